"""Planted bugs: one line of the code under test replaced, and the simulation run on the result.

They measure the simulator: a bug that it does not find within 1,000 seeds is a hole in it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old` stands in `module` exactly once and becomes `new`."""

    name: str
    module: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a release forgets one owner",
        "cb_backend.core.block_pool",
        "self.ref_counts[block_id] -= 1",
        "self.ref_counts[block_id] -= self.ref_counts[block_id] != 2",
    ),
    Mutant(
        "sharing does not count the new owner",
        "cb_backend.core.block_pool",
        "self.ref_counts[block_id] += 1",
        "self.ref_counts[block_id] = 1",
    ),
    Mutant(
        "a shared block stays among the idle",
        "cb_backend.core.block_pool",
        "del self._idle[block_id]",
        "pass",
    ),
    Mutant(
        "eviction does not tell the prefix cache",
        "cb_backend.core.block_pool",
        "self._on_evict(block_id)",
        "pass",
    ),
    Mutant(
        "a digest forgets its parent",
        "cb_backend.core.prefix_cache",
        "parent = hashlib.sha256(parent + tokens).digest()",
        "parent = hashlib.sha256(tokens).digest()",
    ),
    Mutant(
        "a cached block is overwritten by a later equal one",
        "cb_backend.core.prefix_cache",
        "if digest in self._block_of or block_id in self._digest_of:",
        "if block_id in self._digest_of:",
    ),
    Mutant(
        "the salt is left out",
        "cb_backend.core.prefix_cache",
        "salt_bytes, adapter_bytes = salt.encode(), adapter.encode()",
        'salt_bytes, adapter_bytes = b"", adapter.encode()',
    ),
    Mutant(
        "a block is indexed before it is full",
        "cb_backend.core.kv_blocks",
        "num_full = num_computed // self.block_size",
        "num_full = self.blocks_for(num_computed)",
    ),
    Mutant(
        "the whole prompt may come from the cache",
        "cb_backend.core.kv_blocks",
        "digests = request.block_hashes[: (request.num_tokens - 1) // self.block_size]",
        "digests = request.block_hashes",
    ),
    Mutant(
        "the last partial block is not counted",
        "cb_backend.core.kv_blocks",
        "return -(-num_tokens // self.block_size)",
        "return max(num_tokens // self.block_size, 1)",
    ),
    Mutant(
        "an ended request keeps its last block",
        "cb_backend.core.kv_blocks",
        "self.pool.release(owned(request.block_table))",
        "self.pool.release(owned(request.block_table)[:-1])",
    ),
    Mutant(
        "a fork writes into its parent's last block",
        "cb_backend.core.kv_blocks",
        "return Found(parent.block_table[:num_full], [], forked, num_tokens)",
        "return Found(parent.block_table[: num_full + (forked is not None)], [], None, num_tokens)",
    ),
    Mutant(
        "a fork copies the block before",
        "cb_backend.core.kv_blocks",
        "forked = parent.block_table[num_full] if",
        "forked = parent.block_table[num_full - 1] if",
    ),
    Mutant(
        "a swapped-in block may be overwritten by what it makes room for",
        "cb_backend.core.kv_blocks",
        "self.host.pinned = frozenset(request.block_hashes) if found.swapped else frozenset()",
        "pass",
    ),
    Mutant(
        "a failed step's copies to the host are believed",
        "cb_backend.core.scheduler",
        "self.blocks.host.discard(out)",
        "pass",
    ),
    Mutant(
        "the host's blocks are found out of order",
        "cb_backend.core.kv_blocks",
        "for digest in digests[len(shared) :]:",
        "for digest in digests[len(shared) + 1 :]:",
    ),
    Mutant(
        "preemption keeps the computed count",
        "cb_backend.core.step_planner",
        "request.num_computed_tokens = 0",
        "pass",
    ),
    Mutant(
        "one seat too many",
        "cb_backend.core.step_planner",
        "return len(self._roster.running) < self._limits.max_num_seqs",
        "return len(self._roster.running) <= self._limits.max_num_seqs",
    ),
    Mutant(
        "nothing is set aside for running requests",
        "cb_backend.core.step_planner",
        "draft.left -= len(self._roster.running)",
        "pass",
    ),
    Mutant(
        "what was just displaced is let in again at once",
        "cb_backend.core.step_planner",
        "if request.request_id in draft.preempted:",
        "if False:",
    ),
    Mutant(
        "a fork is taken from a parent in the middle of its prompt",
        "cb_backend.core.step_planner",
        "if parent is not None and parent.num_computed_tokens < request.num_prompt_tokens - 1:",
        "if False:",
    ),
    Mutant(
        "the last in order is served first",
        "cb_backend.core.step_planner",
        "for request in self._roster.in_order():",
        "for request in reversed(self._roster.in_order()):",
    ),
    Mutant(
        "a resumed request forgets its output",
        "cb_backend.core.step_draft",
        "token_ids=tuple(request.token_ids),",
        "token_ids=tuple(request.token_ids[: request.num_prompt_tokens]),",
    ),
    Mutant(
        "a row samples before its last token",
        "cb_backend.core.step_draft",
        "self.samples[place] = num_tokens >= len(request.token_ids)",
        "self.samples[place] = num_tokens >= len(request.token_ids) - 1",
    ),
    Mutant(
        "new blocks are sent again",
        "cb_backend.core.step_draft",
        "= tuple(request.block_table[start:])",
        "= tuple(request.block_table[:] if request.block_table[start:] else ())",
    ),
    Mutant(
        "the executor is not told who left",
        "cb_backend.core.roster",
        "self._retired.append(request.request_id)",
        "pass",
    ),
    Mutant(
        "forks of an ended request are forgotten",
        "cb_backend.core.roster",
        "for fork in self.forks.pop(request.request_id, ()):",
        "for fork in self.forks.pop(request.request_id, ())[1:]:",
    ),
    Mutant(
        "the running are ordered by arrival under any policy",
        "cb_backend.core.roster",
        "return policy.key(request), request.request_id",
        "return (request.sequence,), request.request_id",
    ),
    Mutant(
        "the queue forgets the policy's key",
        "cb_backend.core.waiting_queue",
        "group, key = self._policy.group(request), self._policy.key(request)",
        "group, key = self._policy.group(request), (-request.sequence,)",
    ),
    Mutant(
        "a failed row goes on",
        "cb_backend.core.scheduler",
        "if (error := result.failed.get(request.request_id)) is not None:",
        "if (error := result.failed.get(request.request_id)) is not None and not samples:",
    ),
    Mutant(
        "a stop token is ignored",
        "cb_backend.core.request",
        "if token_id in self.stop_token_ids:",
        "if token_id in self.stop_token_ids and len(sampled) > 1:",
    ),
    Mutant(
        "one token too many",
        "cb_backend.core.request",
        "if len(token_ids) == self.most_tokens:",
        "if len(token_ids) == self.most_tokens + 1:",
    ),
    Mutant(
        "a cohort goes on to somebody's end",
        "cb_backend.core.cohort",
        "or num_on + 1 >= self.num_steps",
        "",
    ),
    Mutant(
        "a cohort ignores stop tokens",
        "cb_backend.core.cohort",
        "if not self.stop_token_ids.isdisjoint(token_ids):",
        "if False:",
    ),
    Mutant(
        "a step that goes on takes its blocks one step late",
        "cb_backend.core.cohort",
        "return self._places[-num_on %",
        "return self._places[(1 - num_on) %",
    ),
    Mutant(
        "a cohort outlives a change",
        "cb_backend.core.step_draft",
        "if num_changes != self.num_changes or self._places",
        "if self._places",
    ),
    Mutant(
        "a shrink forgets to move a table",
        "cb_backend.core.pool_resize",
        "table[:] = [moved.get(block_id, block_id) for block_id in table]",
        "pass",
    ),
    Mutant(
        "a shrink forgets to move the contents",
        "cb_backend.core.pool_resize",
        "copies += [BlockCopy(CopyKind.FORK, source, target) for source, target in moved.items()]",
        "pass",
    ),
    Mutant(
        "a shrink forgets the prefix cache",
        "cb_backend.core.pool_resize",
        "blocks.prefix_cache.rename(moved)",
        "pass",
    ),
    Mutant(
        "the window is one block too small",
        "cb_backend.core.kv_blocks",
        "return max(num_computed - self._window + 1, 0) // self.block_size",
        "return max(num_computed - self._window + self.block_size, 0) // self.block_size",
    ),
    Mutant(
        "a fork shares what its parent has given up",
        "cb_backend.core.kv_blocks",
        "if HOLE in parent.block_table[self._num_unseen(num_tokens) : num_full + 1]:",
        "if False:",
    ),
    Mutant(
        "a pin does not own its blocks",
        "cb_backend.core.prefix_pins",
        "self._pool.share(block_ids)",
        "pass",
    ),
    Mutant(
        "an expired pin keeps its blocks",
        "cb_backend.core.prefix_pins",
        "self._pool.release(self._pins.pop(digest)[0])",
        "self._pins.pop(digest)",
    ),
    Mutant(
        "pins stand in the way of a request that needs the pool",
        "cb_backend.core.step_planner",
        "if self._roster.running or not self._blocks.pins.drop_oldest():",
        "if True:",
    ),
)
