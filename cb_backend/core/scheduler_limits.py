"""What the scheduler has to share out."""

from __future__ import annotations

from dataclasses import dataclass

from cb_backend.core.swap_costs import COPYING_IS_FREE, SwapCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    num_blocks: int
    block_size: int  # tokens
    max_num_seqs: int
    max_num_batched_tokens: int  # at least max_num_seqs
    max_prefill_chunk: int  # tokens that one request takes of a step that others want too
    enable_prefix_caching: bool
    num_host_blocks: int = 0
    swap_costs: SwapCosts = COPYING_IS_FREE
    window: int | None = None  # tokens; blocks that fell out of it are never read again
