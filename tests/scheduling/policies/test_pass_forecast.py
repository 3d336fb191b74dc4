"""Where a request costs least when prompts of many chunks are about."""

from __future__ import annotations

import random

import msgspec
import pytest
from driver import Driver
from harness.learned_instance import FIXED_S, PAIR_S, TOKEN_S, instance, request

from sglang_sbs.scheduling import InstanceDown, InstanceUp
from sglang_sbs.scheduling.events import BlocksStored
from sglang_sbs.scheduling.policies.adaptive import batch
from sglang_sbs.scheduling.policies.adaptive.pass_forecast import (
    Home,
    PassForecast,
    Terms,
    homes,
)
from sglang_sbs.scheduling.policies.tuning import TUNING
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefix.places import Hits
from sglang_sbs.scheduling.request import Request

DEFAULT = Terms(again_weight=1.0)


def forecast(it: PrefillInstance, start_s: float = 0.0, *, closed: bool = False) -> PassForecast:
    return PassForecast(it).fork(start_s, closed=closed)


def at(
    name: str,
    forecasts,
    queue,
    *,
    may_go=True,
    far=(),
    terms=DEFAULT,
) -> set[str]:
    """Return the requests whose cheapest place is there."""
    by_id = {known.instance.id: known for known in (*forecasts, *far)}
    near = [forecast.instance.id for forecast in forecasts]
    others = by_id.keys() - near
    found, _ = homes(near, others, by_id, queue, lambda _: terms, lambda _r, _i: may_go)
    return {rid for rid, home in found.items() if home.instance == name}


def pass_s(tokens: int, context: int = 0) -> float:
    return FIXED_S + TOKEN_S * tokens + PAIR_S * tokens * (context + tokens / 2)


def test_on_an_empty_instance_a_request_costs_its_passes():
    predicted = forecast(instance(), start_s=5.0)
    assert predicted.cost_s(request("r", 500), Terms()) == pytest.approx(
        5.0 + pass_s(500), rel=0.02
    )
    chunks_s = pass_s(1000) + pass_s(1000, 1000) + pass_s(500, 2000)
    weight = predicted.cost_s(request("r", 2500), Terms()) / (5.0 + chunks_s)
    assert weight > 1, "the delays of long prompts are the tail"


def test_a_short_prompt_that_joins_a_long_one_waits_for_its_chunk():
    it = instance()
    it.on_dispatched("long", 0, 5000, now_s=0.0)
    it.ranks[0].compute(3000)
    it.ranks[0].flight.reduce(it.ranks[0].requests["long"], 3000)
    cost_s = forecast(it).cost_s(request("r", 200), Terms())
    assert cost_s >= 0.9 * pass_s(1000, 2000)
    assert forecast(instance()).cost_s(request("r", 200), Terms()) < 0.5 * cost_s


def test_the_cost_includes_the_delay_of_later_requests():
    busy = instance()
    for index in range(4):
        busy.on_dispatched(f"r{index}", index % 2, 100, now_s=0.0)
    two_s = 2 * (pass_s(100) - FIXED_S)
    expected_s = two_s + pass_s(600) + 4 * (pass_s(600) - FIXED_S)
    assert forecast(busy).cost_s(request("r", 600), Terms()) == pytest.approx(expected_s, rel=0.02)


def test_what_arrives_during_the_pass_that_it_takes_counts():
    def cost_s(pass_mean_s: float) -> float:
        terms = Terms(waiting_per_s=10.0, pass_s=pass_mean_s)
        return forecast(instance()).cost_s(request("r", 600), terms)

    own_s = pass_s(600)
    # No fewer than in a mean pass: where passes are short, others will be longer.
    assert cost_s(2 * own_s) == pytest.approx(own_s + 10.0 * 2 * own_s * own_s, rel=0.02)
    # And a long pass keeps all those waiting that come while it lasts.
    assert cost_s(own_s / 4) == pytest.approx(own_s + 10.0 * own_s * own_s, rel=0.02)


def test_a_closed_pass_takes_nothing_more():
    it = instance()
    it.on_dispatched("r", 0, 300, now_s=0.0)
    open_s, closed_s = (
        forecast(it, closed=closed).cost_s(request("r", 100), Terms()) for closed in (False, True)
    )
    assert closed_s == pytest.approx(pass_s(300) + pass_s(100), rel=0.05)
    assert open_s < closed_s


def test_short_prompts_keep_away_from_the_instance_of_a_long_one_but_wait_no_longer_than_it_pays():
    slow, free = instance("slow"), instance("free")
    slow.on_dispatched("long", 0, 30_000, now_s=0.0)
    slow.ranks[0].compute(20_000)
    queue = [request(f"r{i}", 100) for i in range(4)]

    def stay(free_at_s: float) -> set[str]:
        return at("slow", [forecast(slow), forecast(free, free_at_s)], queue)

    assert stay(0.5) == set()
    assert stay(60.0) == {"r0", "r1", "r2", "r3"}


def test_each_chooses_after_those_before_it():
    here, there = instance("here", 1), instance("there", 1)
    queue = [request(f"r{i}", 900) for i in range(2)]
    assert at("here", [forecast(here), forecast(there, 0.05)], queue) == {"r0"}
    assert at("here", [forecast(here), forecast(there)], queue, may_go=False) == set()


def test_who_has_waited_long_may_delay_others_more():
    busy, free = instance("busy"), instance("free")
    for index in range(6):
        busy.on_dispatched(f"r{index}", index % 2, 100, now_s=0.0)

    def goes_to_busy(impatience: float) -> bool:
        forecasts = [forecast(busy), forecast(free, 0.3)]
        return bool(
            at(
                "busy",
                forecasts,
                [request("r", 500)],
                terms=Terms(again_weight=1, impatience=impatience),
            )
        )

    assert not goes_to_busy(1.0)
    assert goes_to_busy(3.0)


def test_it_goes_where_most_of_it_is_cached_unless_that_takes_longer():
    near, holder = instance("near"), instance("holder")
    asked = request("r", 9000)
    asked.blocks, asked.block_tokens = range(90), 100
    asked.hits, asked.uncached_tokens = Hits({"holder": [0, 8500]}, 8500), 500

    def goes_to_holder(at_s: float, again_weight: float = 1.0) -> bool:
        far, terms = [forecast(holder, at_s)], Terms(again_weight=again_weight)
        return bool(at("holder", [forecast(near)], [asked], far=far, terms=terms))

    assert goes_to_holder(1.0)
    assert not goes_to_holder(20.0)
    assert goes_to_holder(20.0, again_weight=100.0)


def test_on_the_rank_that_holds_it_only_the_rest_is_computed():
    it = instance()
    asked = request("r", 2500)
    asked.blocks, asked.block_tokens = range(25), 100
    asked.hits, asked.uncached_tokens = Hits({"p0": [0, 2000]}, 2000), 500
    assert forecast(it).cost_s(asked, Terms()) == pytest.approx(pass_s(500, 2000), rel=0.02)


def test_long_prompts_leave_the_other_instance_to_the_short_ones():
    it = Driver(policy="sbs", trigger="adaptive").up(prefill=2)
    first = it.arrive("long", 20_000)
    assert [dispatch.prefill for dispatch in first] == ["p0"]
    assert [dispatch.prefill for dispatch in it.arrive("short", 100)] == ["p1"]


def test_what_suits_nowhere_leaves_when_it_is_overdue():
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=1.0)
    for name, chunk_tokens in (("small", 1000), ("large", 4000), ("gone", 1000)):
        it.tell(InstanceUp(instance=name, role="prefill", dp_size=2, chunk_tokens=chunk_tokens))
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
    it.tell(InstanceDown(instance="gone"))
    it.arrive("many chunks", 9000)
    it.arrive("retry", 3000, exclude=("large",))
    it.wait(1.5)
    assert {dispatch.rid: dispatch.prefill for dispatch in it.dispatched}["retry"] == "small"


def cached_in_storage(rid: str, tokens: int, to_fetch: dict[str, list[int]]) -> Request:
    """All but 500 tokens of a prompt, on whatever rank."""
    asked = request(rid, tokens)
    held = tokens - 500
    asked.blocks, asked.block_tokens = range(tokens // 100), 100
    asked.hits = Hits(
        {name: [held] * len(ranks) for name, ranks in to_fetch.items()}, held, to_fetch
    )
    asked.uncached_tokens = 500
    return asked


def test_what_is_in_storage_costs_no_computing_but_a_pass_begins_without_it():
    it = instance()
    it.on_dispatched("first", 0, 900, now_s=0.0)
    fetched = cached_in_storage("r", 8500, {"p0": [8000, 8000]})
    computed = request("r", 8500)
    from_storage_s, without_s = (
        forecast(it).cost_s(request, Terms()) for request in (fetched, computed)
    )
    assert from_storage_s < without_s
    # It shares no pass with the first one, so that one is not delayed and neither is it.
    assert from_storage_s == pytest.approx(pass_s(900) + pass_s(500, 8000), rel=0.05)


def test_on_an_idle_instance_it_begins_when_it_is_there():
    fetched = cached_in_storage("r", 100_500, {"p0": [100_000, 100_000]})
    local = cached_in_storage("r", 100_500, {"p0": [0, 100_000]})
    there_s, fetching_s = (
        forecast(instance()).cost_s(request, Terms()) for request in (local, fetched)
    )
    assert fetching_s - there_s == pytest.approx(
        100_000 * (TUNING.fetch_token_s + TUNING.load_token_s)
    )


def test_all_ranks_wait_while_one_loads_what_was_fetched():
    def beside(to_fetch: list[int]) -> float:
        it = forecast(instance())
        it.add(cached_in_storage("turn", 8500, {"p0": to_fetch}), Terms())
        return it.cost_s(request("other", 100), Terms())

    assert beside([8000, 8000]) - beside([0, 8000]) == pytest.approx(8000 * TUNING.load_token_s)


def test_it_is_the_rank_of_the_forecast_that_a_request_goes_to():
    request = cached_in_storage("r", 8500, {"p0": [8000, 0]})
    forecasts = {"p0": forecast(instance())}
    found, _ = homes(["p0"], set(), forecasts, [request], lambda _: DEFAULT, lambda *_: True)
    assert found == {"r": Home("p0", 1)}


@pytest.mark.parametrize(("cached_tokens", "leaves"), [(900, True), (400, False)])
def test_where_most_is_cached_nobody_waits_for_the_last_moment(cached_tokens: int, leaves: bool):
    it = Driver(policy="sbs", trigger="adaptive", t_default_s=0.5)
    for name in ("p0", "p1"):
        up = InstanceUp(instance=name, role="prefill", dp_size=2, chunk_tokens=1000, overlap=True)
        it.tell(up)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
    for engine in it.scheduler.prefill.values():
        for _ in range(40):
            engine.on_dispatched("turn before", 0, 1000, it.now_s, cached_tokens)
            engine.dropped("turn before", 0)
    for number in (1, 2):
        (sent,) = it.arrive(f"cut {number}", 20_000)
        tokens = [1000 * (rank == sent.prefill_rank) for rank in (0, 1)]
        said = {"kind": "launch", "tokens_per_rank": tokens, "extend_tokens": 1000}
        it.now_s += 0.005
        for forward_id, rids in ((1, [sent.rid]), (2, [])):
            left = {"chunk_remainder_tokens": 20_000 - 1000 * forward_id}
            it.report(
                sent.prefill, sent.prefill_rank, forward_id=forward_id, rids=rids, **said, **left
            )
    assert bool(it.arrive("turn", 100)) is leaves


def test_a_request_goes_to_the_rank_that_need_not_fetch_it():
    it = Driver(policy="sbs", trigger="adaptive")
    up = {"role": "prefill", "dp_size": 4, "chunk_tokens": 1000, "page_size": 100}
    it.tell(InstanceUp(instance="p0", **up, prefix_source="events", shares_storage=True))
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=2))
    it.tell(BlocksStored(instance="p0", dp_rank=2, blocks=list(range(50))))
    it.arrive("r", 5200, blocks=list(range(52)), block_tokens=100)
    (sent,) = it.dispatched
    assert (sent.prefill_rank, sent.cached_tokens) == (2, 5000)


def test_of_a_prompt_that_was_sent_the_cached_part_has_no_weight():
    """A turn of 9000 tokens with 8900 cached counts as a request of one chunk, not of nine."""
    it = instance()
    it.on_dispatched("turn", 0, 9000, now_s=0.0, cached_tokens=8900)
    assert [a_pass.ends for a_pass in forecast(it)._passes] == [1.0]


def test_a_pass_that_is_no_requests_home_takes_no_look_at_the_queue(monkeypatch):
    """Caches gather the homes on few instances. The passes of all others are open as well, and no
    request of the queue may leave for them."""
    looks = 0
    skip = batch._Filters._skip

    def counted(filters, request):
        nonlocal looks
        looks += 1
        return skip(filters, request)

    monkeypatch.setattr(batch._Filters, "_skip", counted)
    waiting, page, pages, chances = 150, 64, 50, random.Random(1)
    driver = Driver()
    for number in range(60):
        up = InstanceUp(instance=f"p{number}", role="prefill", dp_size=2, chunk_tokens=16 * page)
        caching = {"page_size": page, "prefix_source": "approximate", "overlap": True}
        driver.tell(msgspec.structs.replace(up, **caching))
    driver.tell(InstanceUp(instance="d0", role="decode", dp_size=32))
    most = 0
    for number in range(waiting):
        conversation, shared = chances.randrange(5), chances.randrange(pages)
        first = [10_000 * conversation + at for at in range(shared)]
        own = [10**6 * (1 + number) + at for at in range(pages - shared)]
        looks = 0
        driver.arrive(f"r{number}", pages * page, blocks=[*first, *own], block_tokens=page)
        most = max(most, looks)
        driver.wait(1e-5)
    for _ in range(20):
        looks = 0
        driver.wait(0.01)
        most = max(most, looks)
    assert len(driver.scheduler.queue) > waiting / 2
    assert most < 60 * waiting


def test_the_passes_of_a_very_long_prompt_are_not_predicted_one_by_one():
    chunks = 1000
    lengths_s = [pass_s(1000, 1000 * index) for index in range(chunks)]
    weight = 1 + TUNING.chunk_weight * (chunks - 1)
    delays = 0.5 * sum(length_s * length_s for length_s in lengths_s)
    predicted = forecast(instance())
    cost_s = predicted.cost_s(request("r", 1000 * chunks), Terms(waiting_per_s=0.5))
    assert cost_s == pytest.approx(weight * sum(lengths_s) + delays, rel=0.15)
    for number in range(3):
        predicted.add(request(f"r{number}", 1000 * chunks), Terms())
    assert len(predicted._passes) <= TUNING.most_forecast
    # Two are on one rank, and what comes behind them waits for all of their passes.
    behind_s = predicted.cost_s(request("short", 100), Terms())
    assert behind_s > 0.9 * chunks * predicted._passes[-1].length_s
