"""Who is served next, and who gives way. Engine thread only; plain bookkeeping, no clock.

A policy answers with keys that do not change while a request waits, so that a queue of ten
thousand costs no more than a queue of ten. Write your own by subclassing `Policy` and overriding
what differs; the configuration names it as "module:Class".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping

from cb_backend.config import EngineConfig
from cb_backend.core.request import Request
from cb_backend.errors import ConfigError

Key = tuple[float, ...]  # compared with keys of the same policy only; the smallest goes first


class Policy:
    """First come, first served: the order of arrival, and the latest arrival gives way."""

    name = "fcfs"
    keeps_accounts = False  # whether `charged` wants to be told of every step

    def key(self, request: Request) -> Key:
        """The request's place, which stays while it lives: the smallest is admitted first, gets its
        blocks first, and is the last to be preempted when blocks run out."""
        return (request.sequence,)

    def group(self, request: Request) -> str:
        """Requests of one group are ordered by `key`; groups among each other by `rank`."""
        return ""

    def rank(self, group: str) -> float:
        """The group with the smallest rank is next. May change from step to step."""
        return 0.0

    def displaces(self, waiting: Request, running: Request) -> bool:
        """Whether `waiting` may take the seat and the blocks of `running`, which has the greatest
        key of all. Never true both ways, or the two would throw each other out for ever."""
        return False

    def activated(self, group: str, active: Collection[str]) -> None:
        """`group` has something queued or running again; `active` are the others that do."""

    def charged(self, request: Request, num_computed: int, num_cached: int) -> None:
        """A step computed so many tokens of the request; its admission saved `num_cached`."""


class PriorityPolicy(Policy):
    """Higher `priority` first, for seats as well as for blocks, with ageing.

    Every `ageing_s` seconds of waiting are worth one level. As all age alike, the order by level
    plus age is the order by arrival minus level: it never changes. The bound that follows: nobody
    who arrives more than `ageing_s` times the difference of levels later is served earlier.
    """

    name = "priority"

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s

    def key(self, request: Request) -> Key:
        return (request.arrival_time - request.priority * self._ageing_s, request.sequence)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.priority > running.priority and self.key(waiting) < self.key(running)


class DeadlinePolicy(Policy):
    """Earliest deadline first; requests without one come after all that have one.

    What cannot meet its deadline is refused at submit, by the engine, which knows the rates.
    """

    name = "deadline"

    def key(self, request: Request) -> Key:
        return (request.deadline, request.sequence)

    def displaces(self, waiting: Request, running: Request) -> bool:
        return waiting.deadline < running.deadline


class FairPolicy(Policy):
    """Shares the device among tenants by weight, whatever each of them asks for.

    Each tenant has a virtual counter of what it was served, divided by its weight; the tenant with
    the smallest is next. Output tokens cost more than prompt tokens and cached ones less, as they
    do on the device. A tenant that comes back starts level with the least served active one, so
    idle time cannot be saved up. (The virtual token counter of Sheng et al., "Fairness in Serving
    Large Language Models", OSDI 2024.)
    """

    name = "fair"
    keeps_accounts = True
    COST_OF_PROMPT_TOKEN = 1.0
    COST_OF_CACHED_TOKEN = 0.1
    COST_OF_OUTPUT_TOKEN = 2.0

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self.counters: dict[str, float] = {}

    def group(self, request: Request) -> str:
        return request.tenant

    def rank(self, group: str) -> float:
        return self.counters[group]

    def activated(self, group: str, active: Collection[str]) -> None:
        least = min((self.counters[other] for other in active), default=0.0)
        self.counters[group] = max(self.counters.get(group, 0.0), least)
        # Whoever is idle and not ahead would start level anyway: no need to remember them.
        for idle in self.counters.keys() - set(active) - {group}:
            if self.counters[idle] <= least:
                del self.counters[idle]

    def charged(self, request: Request, num_computed: int, num_cached: int) -> None:
        num_before, tenant = request.num_charged, request.tenant
        request.num_charged = num_before + num_computed + num_cached
        cost = num_computed * self.COST_OF_OUTPUT_TOKEN
        if num_before < request.num_prompt_tokens:  # else it is one output token, as a rule
            num_prompt = min(num_computed, request.num_prompt_tokens - num_before)
            cost += num_prompt * (self.COST_OF_PROMPT_TOKEN - self.COST_OF_OUTPUT_TOKEN)
        if num_cached:
            cost += num_cached * self.COST_OF_CACHED_TOKEN
        self.counters[tenant] += cost / self._weights.get(tenant, 1.0)


def policy_of(config: EngineConfig, name: str) -> Policy:
    """The policy of that name, as configured, or the user's own, as "module:Class".

    Raises ConfigError when there is none.
    """
    if ":" in name:
        return _own_policy(name)
    if name not in POLICIES:
        raise ConfigError(
            f"policy must be one of {', '.join(sorted(POLICIES))} or module:Class, got {name!r}",
            field="policy",
        )
    return POLICIES[name](config)


def _own_policy(name: str) -> Policy:
    module, _, attribute = name.partition(":")
    try:
        kind = getattr(importlib.import_module(module), attribute)
        if not (isinstance(kind, type) and issubclass(kind, Policy)):
            raise TypeError("it must be a subclass of cb_backend.core.policies.Policy")
        return kind()
    except Exception as error:  # whatever the user's own module raises
        raise ConfigError(f"policy {name!r} cannot be made: {error}", field="policy") from error


POLICIES: dict[str, Callable[[EngineConfig], Policy]] = {
    "fcfs": lambda config: Policy(),
    "priority": lambda config: PriorityPolicy(config.priority_ageing_s),
    "deadline": lambda config: DeadlinePolicy(),
    "fair": lambda config: FairPolicy(config.tenant_weights or {}),
}
