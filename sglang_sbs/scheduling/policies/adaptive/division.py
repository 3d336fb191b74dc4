"""Divides the queue between the open passes and later ones. A pass gets a share of the queue or,
with prompts of several chunks, the requests that cost least there. Must not know when a batch
leaves, or DP ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from itertools import islice
from typing import NamedTuple, TypeAlias

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import (
    BatchAffinity,
    CacheAffinity,
    ForecastAffinity,
)
from sglang_sbs.scheduling.policies.adaptive.few_requests import WaitingWork, cut_of
from sglang_sbs.scheduling.policies.adaptive.openings import Openings, full_ahead, has_room
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home, PassForecast, Terms, homes
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request

Requests = list[Request]


class Share(NamedTuple):
    """Division of the queue by number: any request may go anywhere, and a batch gets the first
    requests of the queue. Their number minimises the sum of predicted completion times."""

    view: View
    openings: Openings
    homes: Mapping[str, Home] = {}
    costs_s: Mapping[str, Mapping[InstanceId, float]] = {}

    @property
    def passes(self) -> list[OpenPass]:
        return [*self.openings.passes.values()]

    def affinity(self, moment: CacheAffinity, instance: PrefillInstance) -> BatchAffinity:
        return BatchAffinity(moment, instance)

    def part(self, opening: OpenPass, head: Requests, rest: Requests) -> tuple[Requests, Requests]:
        """Return the requests for this pass, the first ones of ``head`` (those that fit into it),
        and the requests left for passes that start later: the others, then ``rest``."""
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
    """Division of the queue by request: each goes to the instance where it costs least
    (:mod:`.pass_forecast`)."""

    openings: Openings
    passes: list[OpenPass]
    homes: Mapping[str, Home]
    """Chosen instance and DP rank by request id."""
    costs_s: Mapping[str, Mapping[InstanceId, float]]
    """Cost in seconds by request id and instance, for each instance that was compared."""

    def affinity(self, moment: CacheAffinity, instance: PrefillInstance) -> BatchAffinity:
        return ForecastAffinity(moment, instance, self.homes, self.costs_s)

    def part(self, _opening: OpenPass, head: Requests, rest: Requests) -> tuple[Requests, Requests]:
        return head, rest


Division: TypeAlias = Share | Forecast


def divide(view: View, openings: Openings) -> Division:
    """Divide the queue between the open passes and later ones (step 3 of a decision): by request if
    prompts of several chunks matter and a pass is open, otherwise by number."""
    if not (view.by_forecast and openings.any):
        return Share(view, openings)
    opened, starts = openings.passes, view.starts
    found, costs_s = _homes(view, opened)
    early = [
        full_ahead(view, instance)
        for instance in starts.in_order()
        if instance in view.early and instance not in opened and _is_urgent(instance, found)
    ]
    return Forecast(openings, [*opened.values(), *early], found, costs_s)


class _Forecasts(dict[InstanceId, PassForecast]):
    """Forecast of the next passes by instance, computed on first use."""

    def __init__(self, view: View, opened: Collection[PrefillInstance]) -> None:
        self._view = view
        self._opened = opened

    def __missing__(self, name: InstanceId) -> PassForecast:
        view, instance = self._view, self._view.learned.lineup.by_id[name]
        takes_batch = has_room(instance) and not instance.ranks.has_flight
        is_open = takes_batch or instance in view.early or instance in self._opened
        self[name] = found = view.learned.long.forecast(instance, view.at, closed=not is_open)
        return found


def _homes(
    view: View, opened: Collection[PrefillInstance]
) -> tuple[dict[str, Home], dict[str, dict[InstanceId, float]]]:
    """Return the instance and rank where each request costs least, and its cost per compared
    instance in seconds, both by request id (:func:`.homes`)."""
    learned, now_s, instances = view.learned, view.at.now_s, view.instances
    starts = view.starts
    offered, most = learned.offered, TUNING.nearest
    near = list(dict.fromkeys([*opened, *islice(starts.in_order(), most)]))[:most]
    pass_s = learned.interval.mean_forward_s
    terms = Terms(
        waiting_per_s=TUNING.slack * offered.request_rate / len(instances),
        pass_s=pass_s,
        again_weight=TUNING.again_weight * offered.load**2 / (1 - offered.load),
    )

    def terms_of(request: Request) -> Terms:
        chunks = math.ceil(request.uncached_tokens / learned.long.chunk_tokens)
        waited = (now_s - request.arrived_s) / (pass_s * chunks)
        return terms._replace(impatience=1 + TUNING.ageing * waited)

    def may_go(request: Request, instance: PrefillInstance) -> bool:
        return request.may_use(instance, instances) and not view.in_one_pass(request, instance)

    names = [instance.id for instance in near]
    return homes(
        names,
        learned.lineup.by_id.keys() - names,
        _Forecasts(view, opened),
        view.queue.in_order(),
        terms_of,
        may_go,
    )


def _is_urgent(instance: PrefillInstance, found: Mapping[str, Home]) -> bool:
    """Return whether some request with its place on this instance fits into the rank's next pass,
    and so should leave early. The instance is cutting prompts, so it forms each pass when the one
    before starts, and a late request waits for a whole pass. Waiting would hardly change the place,
    because caches decide it."""
    return any(
        home.instance == instance.id
        and instance.ranks[home.rank].ahead_tokens < instance.chunk_tokens
        for home in found.values()
    )
