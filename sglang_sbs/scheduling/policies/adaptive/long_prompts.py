"""Detects whether prompts of several chunks matter, and forecasts the passes of a cluster with
such prompts.

A prompt of several chunks makes several passes of its instance long. So where requests go matters
more than how many leave. Must not know when a batch leaves, or DP ranks.
"""

from __future__ import annotations

from sglang_sbs.scheduling.policies.adaptive.lineup import Moment
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import PassForecast
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request


class LongPrompts:
    """Detects prompts of several chunks, and keeps a forecast of each instance's passes."""

    def __init__(self, offered: OfferedLoad) -> None:
        self._offered = offered
        self.chunk_tokens = 1.0
        """Mean chunk of the instances, in tokens."""
        self._largest_chunk_tokens = 0
        self.uneven_chunks = False
        self._is_single = False
        self._laid: dict[PrefillInstance, PassForecast] = {}
        """Forecast of each instance with its present requests; stale once these change."""

    def on_topology_change(self, instances: Instances) -> None:
        chunks = [instance.chunk_tokens for instance in instances]
        if chunks:
            self.chunk_tokens = sum(chunks) / len(chunks)
        self._largest_chunk_tokens = max(chunks, default=0)
        self.uneven_chunks = len(set(chunks)) > 1
        self._is_single = len(instances) == 1
        self._laid.clear()

    def matter(self, queue: RequestQueue, most_chunks: float) -> bool:
        """Return whether each request must be placed by cost, because prompts of several chunks
        wait in the queue or at an instance. Always False with one instance. ``most_chunks``: length
        of the longest prompt at any instance, in that instance's chunks."""
        if self._is_single:
            return False
        # At light load each prompt that is cut costs a pass, as its instance then launches one
        # ahead. The fuller passes are, the more it costs to hold others for an instance.
        many = 1 + self._offered.load
        limit = many * self._largest_chunk_tokens
        if queue.longest_prompt_tokens > limit and any(
            request.uncached_tokens > limit for request in queue.first(TUNING.most_planned)
        ):
            return True
        return most_chunks > many

    def leave_early(self, instances: Instances) -> list[PrefillInstance]:
        """Return the instances for which requests may leave before a batch could: those that form
        their next pass ahead and have room. Empty unless most tokens of sent prompts were cached,
        as in agents' turns, because then caches decide where a request goes."""
        if sum([i.cached_share for i in instances]) <= len(instances) / 2:
            return []
        return [i for i in instances if i.forms_ahead and i.ranks.has_room]

    def forecast(self, instance: PrefillInstance, at: Moment, *, closed: bool) -> PassForecast:
        """Return a forecast of an instance's next passes, to which requests can be added.
        ``closed``: requests sent now cannot be in the first of them."""
        known = self._laid.get(instance)
        if known is None or known.version != instance.ranks.version:
            known = self._laid[instance] = PassForecast(instance)
        free_s = at.free_at_s(instance)
        if at.misses_next(instance):
            return known.fork(free_s, closed=True)
        return known.fork(max(free_s, at.arrives_s), closed=closed)

    def in_one_pass(
        self, request: Request, instance: PrefillInstance, instances: Instances
    ) -> list[PrefillInstance]:
        """Return the allowed instances where a request takes one pass. Empty if it takes one on
        ``instance``, or several everywhere."""
        tokens = request.uncached_tokens_on(instance.id)
        if not instance.chunk_tokens < tokens <= self._largest_chunk_tokens:
            return []
        return [other for other in request.allowed_on(instances) if tokens <= other.chunk_tokens]
