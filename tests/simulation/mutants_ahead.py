"""Planted bugs of running ahead: of steps scheduled while the one before is in flight."""

from __future__ import annotations

from tests.simulation.mutants import Mutant

MUTANTS_AHEAD = (
    Mutant(
        "a token that comes after its request was preempted is not delivered",
        "cb_backend.core.scheduler",
        """            self.waiting.num_tokens += len(token_ids)
""",
        """            self.waiting.num_tokens += len(token_ids)
            if reason is None:
                return []
""",
    ),
    Mutant(
        "a token that comes after its request was preempted ends nothing",
        "cb_backend.core.scheduler",
        """        if reason is not None:
            return [self._finish(""",
        """        if reason is not None and request.status is not RequestStatus.PREEMPTED:
            return [self._finish(""",
    ),
    Mutant(
        "the row of a request that has ended brings it a token",
        "cb_backend.core.scheduler",
        """        if request.status is RequestStatus.FINISHED:
            return []""",
        "",
    ),
    Mutant(
        "a failed step ends its requests again",
        "cb_backend.core.scheduler",
        "if request.status is not RequestStatus.FINISHED:",
        "if True:",
    ),
    Mutant(
        "a block is indexed while the step that fills it is in flight",
        "cb_backend.core.scheduler",
        "self.blocks.index_full(request, num_computed + num_new)",
        "self.blocks.index_full(request, min(request.num_computed_tokens, request.num_tokens))",
    ),
    Mutant(
        "a token is hashed before its id is known",
        "cb_backend.core.scheduler",
        "self.blocks.index_full(request, num_computed + num_new)",
        "self.blocks.index_full(request, request.num_computed_tokens)",
    ),
    Mutant(
        "blocks leave the window before the step that reads them is over",
        "cb_backend.core.scheduler",
        "self.blocks.release_outside_window(request, num_computed + num_new)",
        "self.blocks.release_outside_window(request, num_computed + num_new + block_size)",
    ),
    Mutant(
        "the queue does not count a token that comes late",
        "cb_backend.core.scheduler",
        "self.waiting.num_tokens += len(token_ids)",
        "pass",
    ),
    Mutant(
        "what is set aside for one that only awaits its last token is given away twice",
        "cb_backend.core.step_planner",
        "draft.left += 1  # what was set aside for it",
        "draft.left += 2 - bool(num_left)",
    ),
    Mutant(
        "a request runs on past its last token",
        "cb_backend.core.step_planner",
        "int(num_known + 1 < request.most_tokens)",
        "int(num_known < request.most_tokens)",
    ),
    Mutant(
        "a row whose token is on its way does not sample",
        "cb_backend.core.step_draft",
        "self.samples[place] = num_tokens >= len(request.token_ids)",
        "self.samples[place] = num_tokens == len(request.token_ids)",
    ),
    Mutant(
        "a step that could not be launched is taken for one in flight",
        "cb_backend.engine.engine",
        "if not self._runs_ahead or after.has_failed:",
        "if not self._runs_ahead:",
    ),
)
