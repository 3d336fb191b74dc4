"""One decision of the default policy, as far as it is made. Must not decide anything."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.adaptive.lineup import Moment, Starts
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home
from sglang_sbs.scheduling.policies.policy import Admissible
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.queue.request import RequestQueue


@dataclass(slots=True)
class Decision:
    """One moment: what is known of it, and what follows so far."""

    queue: RequestQueue
    instances: Instances
    admissible: Admissible
    at: Moment
    whole_s: float
    """The lead of a batch of all that wait."""
    overdue: bool
    """The oldest request has waited long enough: whoever can take it does."""
    chunked: bool
    """Prompts of many chunks decide where requests go."""
    late: bool
    """Nothing is committed early, which would take the next pass from an urgent request that comes
    meanwhile."""
    all_idle: bool
    starts: Starts
    under_way: int
    """How many passes an instance begins until what is sent is there: over 1, nothing waits."""
    wake_s: float
    """When to decide again, at the latest."""
    candidates: list[PrefillInstance] = field(default_factory=list)
    ahead: list[PrefillInstance] = field(default_factory=list)
    """Those that should get one for the pass after their next."""
    soonest: PrefillInstance | None = None
    """The instance where a batch would start first."""
    home_of: dict[str, Home] | None = None
    """Where each request should go; None: anywhere, for a fair share of the queue."""
    costs_s: dict[str, dict[InstanceId, float]] = field(default_factory=dict)
    """By request id: what it was weighed to cost at each instance."""

    def passes_of(self, instance: PrefillInstance) -> int:
        """For how many passes together it gets requests."""
        ahead = instance in self.ahead and len(instance.passes) == 1
        return max(self.under_way, 2 if ahead else 1)
