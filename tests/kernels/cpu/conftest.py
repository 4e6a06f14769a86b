"""The library as other processors of this kind get it, each compiled once for all tests."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

import pytest
from cb_kernels.cpu import build
from cb_kernels.cpu.kernels import Kernels

PROCESSORS = {
    "of AMD": ("-UOF_INTEL",),
    "of Intel": ("-DOF_INTEL",),
    "no bf16": ("-mno-avx512bf16",),
    "avx2": ("-mno-avx512bf16", "-mno-avx512f"),
    "sse": ("-mno-avx512bf16", "-mno-avx512f", "-mno-avx2"),
}


@pytest.fixture(name="of_processor", scope="session", params=PROCESSORS)
def _of_processor(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Kernels:
    if platform.machine() != "x86_64":
        pytest.skip("the flags are those of x86")
    folder: Path = tmp_path_factory.mktemp("processor")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "flags", lambda: (*build.FLAGS, *PROCESSORS[request.param]))
        try:
            loaded = Kernels(ctypes.CDLL(str(build.built_library(folder))))
        except build.BuildError as error:
            pytest.skip(str(error))
    assert loaded.has_decoder == loaded.has_linear == (request.param != "sse")
    return loaded
