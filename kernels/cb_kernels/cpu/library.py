"""The one loaded library, or the reason why there is none. Decided at first use, logged once."""

from __future__ import annotations

import ctypes
import functools
import logging
import os

import torch

from cb_kernels.cpu.build import BuildError, built_library
from cb_kernels.cpu.kernels import Kernels
from cb_kernels.cpu.self_test import fault_of

logger = logging.getLogger(__name__)

# "0" leaves everything to torch. Not CB_...: those are the settings of the engine.
SWITCH = "CBKERNELS_C"


@functools.cache
def kernels() -> Kernels | None:
    """The kernels in C, tested against torch; None where torch has to do."""
    if os.environ.get(SWITCH) == "0":
        logger.info("CPU kernels: torch, since %s=0", SWITCH)
        return None
    try:
        path = built_library()
        loaded = Kernels(ctypes.CDLL(str(path)))
    except (BuildError, OSError) as error:
        logger.warning("CPU kernels: torch, since %s", error)
        return None
    # The tests' tensors are the CPU's and have the dtypes they name, whatever device the caller has
    # made the default and whatever it casts to.
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        fault = fault_of(loaded)
        if fault is not None:
            logger.warning("CPU kernels: torch, since the ones in C fail their test: %s", fault)
            return None
        if loaded.has_decoder:
            # Here, since it needs what imports this module.
            from cb_kernels.cpu.decoder_self_test import fault_of_decoder

            fault = fault_of_decoder(loaded)
            loaded.has_decoder = fault is None
            if fault is not None:
                logger.warning(
                    "CPU kernels: no decoder in one call, since it fails its test: %s", fault
                )
    logger.info("CPU kernels: %s, from %s", loaded.name, path)
    return loaded
