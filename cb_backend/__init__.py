"""Continuous batching for language models served from BentoML."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _make_kernels_importable() -> None:
    """`cb_kernels` is installed beside us, or lies in `kernels/` of a checkout or a Bento.

    `kernels/` itself is no package: Hugging Face publishes one of that name, and transformers
    probes for it.
    """
    if importlib.util.find_spec("cb_kernels") is None:
        folder = Path(__file__).resolve().parent.parent / "kernels"
        if (folder / "cb_kernels").is_dir():
            sys.path.append(str(folder))


_make_kernels_importable()
