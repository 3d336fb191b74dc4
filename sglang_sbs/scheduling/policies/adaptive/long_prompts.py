"""Where prompts of several chunks go, and whether they matter.

Such a prompt makes several passes of its instance long, so for all that wait the place matters more
than how many leave. Must not know when a batch leaves, or DP ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from itertools import islice

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.adaptive.lineup import Moment
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home, PassForecast, Terms
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import homes as cheapest_homes
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request


class LongPrompts:
    """Of one cluster, with its chunks."""

    def __init__(self, offered: OfferedLoad, interval: IntervalController) -> None:
        self._offered = offered
        self._interval = interval
        self.chunk_tokens = 1.0
        """The mean of the instances."""
        self._largest_chunk_tokens = 0
        self.uneven_chunks = False
        self._by_id: dict[InstanceId, PrefillInstance] = {}
        self._laid: dict[InstanceId, PassForecast] = {}
        """Of what is there, until something changes."""

    def on_topology_change(self, instances: Instances) -> None:
        if instances:
            self.chunk_tokens = sum(i.chunk_tokens for i in instances) / len(instances)
        chunks = {i.chunk_tokens for i in instances}
        self._largest_chunk_tokens = max(chunks, default=0)
        self.uneven_chunks = len(chunks) > 1
        self._by_id = {instance.id: instance for instance in instances}
        self._laid.clear()

    def matter(self, queue: RequestQueue, most_chunks: float) -> bool:
        """Whether prompts of several chunks wait anywhere, and it matters where. ``most_chunks``:
        of the longest at an instance, in its chunks."""
        if len(self._by_id) == 1:
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

    def leave_early(self, instances: Instances) -> bool:
        """Whether most of what is sent has been cached, as in agents' turns, so that caches settle
        where a request goes, and some engine forms its next pass ahead."""
        is_cached = sum([i.cached_share for i in instances]) > len(instances) / 2
        return is_cached and any(i.forms_ahead and i.has_room for i in instances)

    def homes(
        self,
        candidates: Instances,
        instances: Instances,
        in_order: Iterable[PrefillInstance],
        queue: RequestQueue,
        overdue: bool,
        at: Moment,
        *,
        early: bool = False,
        costs_s: dict[str, dict[InstanceId, float]] | None = None,
    ) -> dict[str, Home]:
        """Where each request costs least, now or later. ``in_order``: of start. ``early``:
        requests may leave before a batch could. ``costs_s``: see :func:`.pass_forecast.homes`."""
        forecasts: dict[str, PassForecast] = {}
        by_id = self._by_id

        def forecast_of(name: str) -> PassForecast | None:
            if name not in forecasts and name in by_id:
                one = by_id[name]
                is_open = may_take(one, False) or (early and one.has_room and one.forms_ahead)
                closed = one not in candidates and not is_open
                forecasts[name] = self._forecast(one, at, closed=closed)
            return forecasts.get(name)

        first = [*candidates[: TUNING.nearest], *islice(in_order, TUNING.nearest)]
        near = list(dict.fromkeys(first))[: TUNING.nearest]
        pass_s = self._interval.mean_forward_s
        anywhere = overdue or not self.uneven_chunks
        terms = Terms(
            waiting_per_s=TUNING.slack * self._offered.request_rate / len(instances),
            pass_s=pass_s,
            again_weight=TUNING.again_weight * self._offered.load**2 / (1 - self._offered.load),
        )

        def terms_of(request: Request) -> Terms:
            chunks = math.ceil(request.uncached_tokens / self.chunk_tokens)
            waited = (at.now_s - request.arrived_s) / (pass_s * chunks)
            return terms._replace(impatience=1 + TUNING.ageing * waited)

        return cheapest_homes(
            [one for instance in near if (one := forecast_of(instance.id)) is not None],
            forecast_of,
            queue.in_order(),
            terms_of,
            lambda request, i: (
                (anywhere or self.suits(request, i, instances))
                and (not request.exclude or request.may_use(i, instances))
            ),
            costs_s=costs_s,
        )

    def _forecast(self, instance: PrefillInstance, at: Moment, *, closed: bool) -> PassForecast:
        known = self._laid.get(instance.id)
        if known is None or known.instance is not instance or known.version != instance.version:
            known = self._laid[instance.id] = PassForecast(instance)
        free_s = at.free_at_s(instance)
        if at.forms_at_s(instance) < at.arrives_s and instance.backlog_tokens:
            # It starts the next one before, with what it has.
            return known.fork(free_s, closed=True)
        return known.fork(max(free_s, at.arrives_s), closed=closed)

    def suits(self, request: Request, instance: PrefillInstance, instances: Instances) -> bool:
        """Not where it takes several passes, if it would take one elsewhere."""
        tokens = request.uncached_tokens_on(instance.id)
        if not instance.chunk_tokens < tokens <= self._largest_chunk_tokens:
            return True
        return not any(tokens <= one.chunk_tokens for one in request.allowed_on(instances))


def early_homes(
    homes: Collection[Home], instances: Iterable[PrefillInstance]
) -> list[PrefillInstance]:
    """The instances where a request should be as soon as possible, which has its home there. They
    are cutting prompts, so they form a pass when the one before starts, and who is late waits for a
    whole pass. Where caches settle where it goes, what comes meanwhile hardly changes that."""
    return [
        one
        for one in instances
        if one.forms_ahead
        and any(
            home.instance == one.id and one.ranks[home.rank].ahead_tokens < one.chunk_tokens
            for home in homes
        )
    ]


def may_take(instance: PrefillInstance, long_queue: bool) -> bool:
    """Whether a batch could go there before its next report. One batch per pass, unless more waits
    than the pass holds. Single requests may still follow it."""
    if instance.has_flight and not long_queue:
        return False
    return instance.has_room and not instance.launching
