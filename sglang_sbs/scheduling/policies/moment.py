"""When the pass starts that a request sent now would be in. Must not know what waits."""

from __future__ import annotations

from typing import NamedTuple

from sglang_sbs.scheduling.prefill.completion import NextPass
from sglang_sbs.scheduling.prefill.instance import PrefillInstance


class Moment(NamedTuple):
    """The time of a decision, and how long the way to an instance takes then."""

    now_s: float
    latency_s: float
    """L_net of a batch that leaves now."""

    @property
    def arrives_s(self) -> float:
        """When a batch that is sent now arrives."""
        return self.now_s + self.latency_s

    def starts_s(self, instance: PrefillInstance) -> tuple[float, float]:
        """When the pass starts that a batch sent now would be in, and when the instance is free."""
        free_s = self.free_at_s(instance)
        if self.forms_at_s(instance) >= self.arrives_s:
            return free_s, free_s
        if instance.backlog_tokens:
            # It starts its next pass before, with what it has.
            return free_s + instance.next_pass_s(), free_s
        return self.arrives_s, free_s

    def next_pass(self, instance: PrefillInstance) -> NextPass:
        """The pass that a batch sent now would be in."""
        free_s = self.free_at_s(instance)
        if instance.launching:
            # The requests on their way start a pass, and the instance is free after that.
            return instance.next_pass(free_s - instance.next_pass_s()).after()
        if self.forms_at_s(instance) >= self.arrives_s:
            return instance.next_pass(free_s)
        if instance.backlog_tokens:
            return instance.next_pass(free_s).after()
        return instance.next_pass(self.arrives_s)

    def free_at_s(self, instance: PrefillInstance) -> float:
        """When an instance could launch something new."""
        return max(self.now_s, instance.free_at_s(self.now_s, self.latency_s))

    def forms_at_s(self, instance: PrefillInstance) -> float:
        """When an instance forms the next batch that a request can still be in."""
        return max(self.now_s, instance.forms_at_s(self.now_s, self.latency_s))
