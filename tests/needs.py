"""What of a machine some tests need."""

from __future__ import annotations

import pytest
import torch
from cb_kernels import can_pair

needs_pairs = pytest.mark.skipif(
    not can_pair(torch.bfloat16, block_size=16, head_dim=32, group=3),
    reason="no kernels in C on this machine",
)
