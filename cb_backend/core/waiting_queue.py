"""The requests that wait, in the order of a policy. Engine thread only.

One heap per group, and the policy's rank among groups. Leaving from the middle is lazy: the heap
entry stays until it comes up or until more than half of a heap is stale.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from cb_backend.core.policies import Key, Policy
from cb_backend.core.request import Request


class WaitingQueue:
    """push, peek and remove cost O(log n), whatever waits; n is the length of one group."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._requests: dict[str, tuple[Request, Key]] = {}
        self._heaps: dict[str, list[tuple[Key, str]]] = {}
        self._sizes: dict[str, int] = {}  # live requests of each group
        self.num_tokens = 0  # known and not computed, of all that wait

    def __len__(self) -> int:
        return len(self._requests)

    def __bool__(self) -> bool:
        return bool(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def __iter__(self) -> Iterator[Request]:
        """In no particular order."""
        return (request for request, _ in self._requests.values())

    def get(self, request_id: str) -> Request | None:
        found = self._requests.get(request_id)
        return None if found is None else found[0]

    def push(self, request: Request) -> None:
        group, key = self._policy.group(request), self._policy.key(request)
        self._requests[request.request_id] = (request, key)
        heapq.heappush(self._heaps.setdefault(group, []), (key, request.request_id))
        self._sizes[group] = self._sizes.get(group, 0) + 1
        self.num_tokens += request.num_tokens

    def peek(self) -> Request:
        """The next one. Raises IndexError when nothing waits."""
        if not self._heaps:
            raise IndexError("peek at an empty queue")
        group = min(self._heaps, key=self._policy.rank)
        heap = self._heaps[group]
        while not self._is_live(heap[0]):
            heapq.heappop(heap)
        return self._requests[heap[0][1]][0]

    def remove(self, request: Request) -> None:
        """Raises KeyError if it does not wait."""
        del self._requests[request.request_id]
        self.num_tokens -= request.num_tokens
        group = self._policy.group(request)
        self._sizes[group] -= 1
        if self._sizes[group] == 0:
            del self._sizes[group], self._heaps[group]
        elif len(self._heaps[group]) > 2 * self._sizes[group] + 16:
            heap = [entry for entry in self._heaps[group] if self._is_live(entry)]
            heapq.heapify(heap)
            self._heaps[group] = heap

    def in_order(self) -> list[Request]:
        """All that wait, group by group, each in its order: for showing positions, not for use in
        a step."""
        ranked = sorted(self._heaps, key=self._policy.rank)
        # One that left and came back under the same key has two entries that look alive.
        ids = dict.fromkeys(
            request_id
            for group in ranked
            for _, request_id in sorted(filter(self._is_live, self._heaps[group]))
        )
        return [self._requests[request_id][0] for request_id in ids]

    def _is_live(self, entry: tuple[Key, str]) -> bool:
        key, request_id = entry
        found = self._requests.get(request_id)
        # A request that left and came back under another key has a second entry.
        return found is not None and found[1] == key
