"""Whether a KV block is cheaper to copy from the host than to compute again. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SwapCosts:
    """Measured by the executor at start, on the device and the model at hand."""

    copy_call_s: float  # of bringing any number of blocks in
    copy_block_s: float  # of each of them
    compute_token_s: float  # of a token in a step of many

    def copying_pays(self, num_blocks: int, block_size: int) -> bool:
        """Against computing the tokens of so many blocks."""
        copying = self.copy_call_s + num_blocks * self.copy_block_s
        return copying < num_blocks * block_size * self.compute_token_s


COPYING_IS_FREE = SwapCosts(0.0, 0.0, 1.0)
