"""A scheduler that keeps nothing from one decision to the next, to compare the real one with."""

from __future__ import annotations

import math

from sglang_sbs.scheduling import Command, Event, Scheduler, SchedulerConfig
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.policies.policy import Plan


class Forgetful(Scheduler):
    """Looks after every instance and looks up every prefix at every event. Under the default policy
    it asks all instances at every decision, whose order and speed it works out anew."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        if isinstance(self.policy, AdaptiveTrigger):
            self.policy.plan = self._plan_anew

    def handle(self, event: Event, now_s: float) -> list[Command]:
        for instance in self.prefill.values():
            instance._on_change()
        for request in self._requests.values():
            request.hits_version = -1
        self._silent_s = -math.inf
        return super().handle(event, now_s)

    def _plan_anew(self, queue, instances, *more) -> Plan:
        for instance in instances:
            instance._changes()
            self.policy.on_forward_learned(instance)
        self.policy._long._laid.clear()
        self.policy._view = None
        lineup = self.policy._lineup
        lineup.refresh()
        for number in range(len(instances)):
            lineup._free.set(number, None)
            lineup._others.add(number)
        return AdaptiveTrigger.plan(self.policy, queue, instances, *more)
