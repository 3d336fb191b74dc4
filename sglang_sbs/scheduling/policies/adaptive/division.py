"""How much of the queue leaves for an open pass, and which requests: a share of the queue, or with
prompts of several chunks the requests that cost least there. Must not know when a batch leaves, or
DP ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.adaptive.cache_affinity import (
    BatchAffinity,
    CacheAffinity,
    ForecastAffinity,
)
from sglang_sbs.scheduling.policies.adaptive.few_requests import Waiting, cut_of
from sglang_sbs.scheduling.policies.adaptive.long_prompts import early_homes
from sglang_sbs.scheduling.policies.adaptive.openings import Openings
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import Home
from sglang_sbs.scheduling.policies.adaptive.view import OpenPass, View
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

    def part(self, one: OpenPass, head: Requests, rest: Requests) -> tuple[Requests, Requests]:
        """The share of a pass of the requests that fit into it (``head``), and the requests that
        are left for passes that start later."""
        view, learned = self.view, self.view.learned
        if len(view.instances) == 1 or one.passes > 1 or view.overdue:
            return head, rest
        waiting = Waiting(
            view.at.now_s,
            view.queue.tokens,
            self.openings.begins,
            learned.offered,
            learned.lineup.marginals,
            learned.lead.whole,
        )
        cut = cut_of(one.instance, head, waiting)
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

    def part(self, _one: OpenPass, head: Requests, rest: Requests) -> tuple[Requests, Requests]:
        return head, rest


Division: TypeAlias = Share | Forecast


def divide(view: View, openings: Openings) -> Division:
    """Step 3: how the queue is divided between the open passes and those that start later."""
    if not (view.by_forecast and openings.any):
        return Share(view, openings)
    costs_s: dict[str, dict[InstanceId, float]] = {}
    instances = [one.instance for one in openings.passes]
    homes = view.learned.long.homes(
        instances,
        view.instances,
        view.in_order(),
        view.queue,
        view.overdue,
        view.at,
        early=openings.early,
        costs_s=costs_s,
    )
    passes = openings.passes
    if openings.early:
        others = (one for one in view.in_order() if one not in instances)
        found = early_homes(homes.values(), others)
        passes = [*passes, *[OpenPass(one, Opening.FULL_AHEAD) for one in found]]
    return Forecast(openings, passes, homes, costs_s)
