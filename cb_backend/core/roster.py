"""Who runs, who waits, and in which order. Engine thread only; knows no blocks and no tokens.

Every live request has one home here: the running, the queue, or the forks, which wait for the
prompt of another request to be computed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from cb_backend.core.policies import Key, Policy
from cb_backend.core.request import Request, RequestStatus
from cb_backend.core.waiting_queue import WaitingQueue

_Place = tuple[Key, str]  # ids are unique


class Roster:
    """Moves requests between their homes and keeps the policy's order of the running."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.running: dict[str, Request] = {}
        self.waiting = WaitingQueue(policy)
        self.forks: dict[str, list[Request]] = {}  # by the request whose prompt they wait for
        self._order: list[Request] = []  # the running, by the policy's key
        self._places: list[_Place] = []  # of each of them, as it was when it began to run
        self._place_of: dict[str, _Place] = {}
        self._active: Counter[str] = Counter()  # requests of each group that run or wait
        self._retired: list[str] = []  # stopped running; the executor still has their rows
        self._num_added = 0
        # How often one left the running, their order changed, or one got more than one token from a
        # step: nothing of which a `Cohort` outlives. Who joins has no place in one.
        self.num_changes = 0

    def use(self, policy: Policy) -> None:
        """Order everything anew."""
        before = self.policy, self.waiting, self._active
        self.num_changes += 1
        order_before = self._order, self._places, self._place_of
        self.policy, self.waiting, self._active = policy, WaitingQueue(policy), Counter()
        try:
            self._place_of = {r.request_id: _place(policy, r) for r in self.running.values()}
            self._order = sorted(
                self.running.values(), key=lambda request: self._place_of[request.request_id]
            )
            self._places = sorted(self._place_of.values())
            for request in self.running.values():
                self._activate(request)
            for request in before[1]:
                self._queue(request)
        except Exception:  # a policy of the user's own may raise: nobody is lost for it
            self.policy, self.waiting, self._active = before
            self._order, self._places, self._place_of = order_before
            raise

    def add(self, request: Request) -> None:
        """Queue a new request, or keep it as a fork until its parent's prompt is computed."""
        self._num_added += 1
        request.sequence = self._num_added
        parent = self.find(request.fork_of)
        if parent is not None and parent.num_output_tokens == 0:
            self.forks.setdefault(parent.request_id, []).append(request)
        else:
            self._queue(request)

    def find(self, request_id: str | None) -> Request | None:
        if request_id is None:
            return None
        found = self.running.get(request_id) or self.waiting.get(request_id)
        forks = (fork for group in self.forks.values() for fork in group)
        return found or next((fork for fork in forks if fork.request_id == request_id), None)

    def in_order(self) -> Sequence[Request]:
        """The running requests in the order of the policy, as they come and go."""
        return self._order

    def last(self) -> Request:
        """The running request that gives way first."""
        return self._order[-1]

    def run(self, request: Request) -> None:
        """From the queue to the running."""
        request.status = RequestStatus.RUNNING
        self.waiting.remove(request)
        self.running[request.request_id] = request
        place = self._place_of[request.request_id] = _place(self.policy, request)
        index = bisect_left(self._places, place)
        self._places.insert(index, place)
        self._order.insert(index, request)

    def preempt(self, request: Request) -> None:
        """From the running back to the queue."""
        self._stop(request)
        request.status = RequestStatus.PREEMPTED
        self.waiting.push(request)

    def end(self, request: Request) -> None:
        """Its forks, if they still wait for its prompt, go on without it."""
        if request.request_id in self.running:
            self._stop(request)
            self._deactivate(request)
        elif request.request_id in self.waiting:
            self.waiting.remove(request)
            self._deactivate(request)
        else:
            self.forks[request.fork_of or ""].remove(request)
        request.status = RequestStatus.FINISHED
        self.queue_forks_of(request)

    def take_retired(self) -> tuple[str, ...]:
        """Who has stopped running since this was last asked."""
        retired, self._retired = tuple(self._retired), []
        return retired

    def queue_forks_of(self, request: Request) -> None:
        """Its prompt is computed, or never will be."""
        for fork in self.forks.pop(request.request_id, ()):
            self._queue(fork)

    def _queue(self, request: Request) -> None:
        self._activate(request)
        self.waiting.push(request)

    def _stop(self, request: Request) -> None:
        self.num_changes += 1
        del self.running[request.request_id]
        index = bisect_left(self._places, self._place_of.pop(request.request_id))
        del self._order[index], self._places[index]
        self._retired.append(request.request_id)

    def _activate(self, request: Request) -> None:
        group = self.policy.group(request)
        if group not in self._active:
            self.policy.activated(group, self._active.keys())
        self._active[group] += 1

    def _deactivate(self, request: Request) -> None:
        group = self.policy.group(request)
        self._active[group] -= 1
        if not self._active[group]:
            del self._active[group]


def _place(policy: Policy, request: Request) -> _Place:
    return policy.key(request), request.request_id
