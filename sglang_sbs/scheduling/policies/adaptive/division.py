"""How much of the queue leaves for an open pass, and which requests: a share of the queue, or with
prompts of several chunks the requests that cost least there. Must not know when a batch leaves, or
DP ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import (
    BatchAffinity,
    CacheAffinity,
    ForecastAffinity,
)
from sglang_sbs.scheduling.policies.adaptive.few_requests import WaitingWork, cut_of
from sglang_sbs.scheduling.policies.adaptive.openings import Openings, may_take
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home, PassForecast, Terms, homes
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.reasons import Opening
from sglang_sbs.scheduling.request import Request

Requests = list[Request]


class Share(NamedTuple):
    """Any request may go anywhere. A batch gets the first of the queue, as many as make the sum of
    predicted completion times smallest."""

    view: View
    openings: Openings
    homes: Mapping[str, Home] = {}
    costs_s: Mapping[str, Mapping[InstanceId, float]] = {}

    @property
    def passes(self) -> list[OpenPass]:
        return self.openings.passes

    def affinity(self, moment: CacheAffinity, instance: PrefillInstance) -> BatchAffinity:
        return BatchAffinity(moment, instance)

    def part(self, opening: OpenPass, head: Requests, rest: Requests) -> tuple[Requests, Requests]:
        """The share of a pass of the requests that fit into it (``head``), and the requests that
        are left for passes that start later."""
        view, learned = self.view, self.view.learned
        if len(view.instances) == 1 or opening.passes > 1 or view.overdue:
            return head, rest
        waiting = WaitingWork(
            view.at.now_s,
            view.queue.tokens,
            self.openings.begins,
            learned.offered,
            learned.lineup.marginals,
            learned.lead.whole,
        )
        cut = cut_of(opening.instance, head, waiting)
        # While all are idle, a prompt longer than the share would be no better off later.
        cut = max(cut, int(learned.lineup.all_idle))
        return head[:cut], head[cut:] + rest


class Forecast(NamedTuple):
    """Each request goes where it costs least (:mod:`.pass_forecast`), all of those that fit."""

    openings: Openings
    passes: list[OpenPass]
    homes: Mapping[str, Home]
    """By request id."""
    costs_s: Mapping[str, Mapping[InstanceId, float]]
    """By request id: what the request would cost at each instance that was compared."""

    def affinity(self, moment: CacheAffinity, instance: PrefillInstance) -> BatchAffinity:
        return ForecastAffinity(moment, instance, self.homes, self.costs_s)

    def part(self, _opening: OpenPass, head: Requests, rest: Requests) -> tuple[Requests, Requests]:
        return head, rest


Division: TypeAlias = Share | Forecast


def divide(view: View, openings: Openings) -> Division:
    """Step 3: how the queue is divided between the open passes and those that start later."""
    if not (view.by_forecast and openings.any):
        return Share(view, openings)
    costs_s: dict[str, dict[InstanceId, float]] = {}
    found = _homes(view, openings, costs_s)
    passes = openings.passes
    if openings.early:
        opened = {a_pass.instance for a_pass in passes}
        early = [
            instance
            for instance in view.in_order()
            if instance not in opened and _is_early(instance, found)
        ]
        passes = [*passes, *[OpenPass(instance, Opening.FULL_AHEAD) for instance in early]]
    return Forecast(openings, passes, found, costs_s)


def _homes(
    view: View, openings: Openings, costs_s: dict[str, dict[InstanceId, float]]
) -> dict[str, Home]:
    """Where each request costs least, now or later (:func:`.pass_forecast.homes`)."""
    learned, at, instances = view.learned, view.at, view.instances
    long, offered, by_id = learned.long, learned.offered, learned.lineup.by_id
    opened = [a_pass.instance for a_pass in openings.passes]
    forecasts: dict[InstanceId, PassForecast] = {}

    def forecast_of(name: InstanceId) -> PassForecast | None:
        if name not in forecasts and name in by_id:
            instance = by_id[name]
            is_early = openings.early and instance.ranks.has_room and instance.forms_ahead
            closed = not (is_early or may_take(instance, False) or instance in opened)
            forecasts[name] = long.forecast(instance, at, closed=closed)
        return forecasts.get(name)

    most = TUNING.nearest
    near = list(dict.fromkeys([*opened[:most], *islice(view.in_order(), most)]))[:most]
    pass_s = learned.interval.mean_forward_s
    terms = Terms(
        waiting_per_s=TUNING.slack * offered.request_rate / len(instances),
        pass_s=pass_s,
        again_weight=TUNING.again_weight * offered.load**2 / (1 - offered.load),
    )
    all_suit = view.overdue or not long.uneven_chunks

    def terms_of(request: Request) -> Terms:
        chunks = math.ceil(request.uncached_tokens / long.chunk_tokens)
        waited = (at.now_s - request.arrived_s) / (pass_s * chunks)
        return terms._replace(impatience=1 + TUNING.ageing * waited)

    def may_go(request: Request, instance: PrefillInstance) -> bool:
        suits = all_suit or not long.in_one_pass(request, instance, instances)
        return suits and request.may_use(instance, instances)

    return homes(
        [forecast for instance in near if (forecast := forecast_of(instance.id)) is not None],
        forecast_of,
        view.queue.in_order(),
        terms_of,
        may_go,
        costs_s,
    )


def _is_early(instance: PrefillInstance, found: Mapping[str, Home]) -> bool:
    """Whether a request whose home is here should be here as soon as possible. The instance is
    cutting prompts, so it forms a pass when the one before starts, and a request that is late waits
    for a whole pass. Where caches settle where requests go, later ones hardly change that."""
    return instance.forms_ahead and any(
        home.instance == instance.id
        and instance.ranks[home.rank].ahead_tokens < instance.chunk_tokens
        for home in found.values()
    )
