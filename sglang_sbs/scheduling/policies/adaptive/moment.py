"""When a batch that leaves now would start, on each instance. Owns that question. Must not know
what waits, or whether it should leave."""

from __future__ import annotations

from typing import NamedTuple

from sglang_sbs.scheduling.prefill.instance import PrefillInstance


class Moment(NamedTuple):
    """The time of a decision."""

    now_s: float
    latency_s: float
    """L_net of a batch that leaves now."""

    @property
    def arrives_s(self) -> float:
        """When what is sent now is there."""
        return self.now_s + self.latency_s

    def starts_s(self, instance: PrefillInstance) -> tuple[float, float]:
        """When the pass starts that a batch sent now would be in, and when the instance is free."""
        free_s = self.free_at_s(instance)
        if self.forms_at_s(instance) >= self.arrives_s:
            return free_s, free_s
        if instance.backlog_tokens:
            # It starts the next one before, with what it has.
            return free_s + instance.next_pass_s(), free_s
        return self.arrives_s, free_s

    def free_at_s(self, instance: PrefillInstance) -> float:
        """When it could launch something new."""
        return max(self.now_s, instance.free_at_s(self.now_s, self.latency_s))

    def forms_at_s(self, instance: PrefillInstance) -> float:
        """Until when a request can still be in the next batch that is formed there."""
        return max(self.now_s, instance.forms_at_s(self.now_s, self.latency_s))
