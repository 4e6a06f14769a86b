"""All of this folder compiles, so Triton must not be its interpreter here."""

from __future__ import annotations

import pytest
from cb_kernels.triton.launch import INTERPRETED

if INTERPRETED:
    pytest.exit("unset TRITON_INTERPRET: these tests need the compiler", returncode=2)
