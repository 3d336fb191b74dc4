"""Engines with overlap scheduling: the rest of a split prompt runs at once, and alone; what waits
when a pass starts is launched behind it without a gap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
from driver import Driver

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.policies.adaptive.lineup import Moment
from sglang_sbs.scheduling.policies.adaptive.openings import _ahead, lookahead
from sglang_sbs.scheduling.policies.adaptive.view import View
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.prefill.passes import Pass


def second_batch(overlap: bool, waiting: list[int]) -> set[str]:
    """Return the requests that leave with ``w0``, the oldest of those that wait for the pass behind
    the first one."""
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=10.0)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    it.tell(InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000))
    # The same again: an engine that was relaunched with other flags.
    it.tell(
        InstanceUp(instance="p0", role="prefill", dp_size=1, chunk_tokens=1000, overlap=overlap)
    )
    it.arrive("first", 700)
    for number, tokens in enumerate(waiting):
        it.arrive(f"w{number}", tokens)
    while not any(dispatch.rid == "w0" for dispatch in it.dispatched):
        it.wait(0.05)
    batch = next(dispatch.batch for dispatch in it.dispatched if dispatch.rid == "w0")
    return {dispatch.rid for dispatch in it.dispatched if dispatch.batch == batch}


def test_a_hole_is_filled_by_splitting_where_the_rest_shares_the_next_pass():
    assert second_batch(False, [700, 600]) == {"w0", "w1"}


def test_it_is_not_where_the_rest_is_a_pass_of_its_own():
    assert second_batch(True, [700, 600]) == {"w0"}


def test_with_more_waiting_than_another_pass_takes_it_is_all_the_same():
    assert len(second_batch(True, [700, 600, 900, 900, 900])) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_what_fits_whole_fills_the_hole_either_way(overlap: bool):
    assert second_batch(overlap, [700, 600, 250]) >= {"w2"}


def sent_before_the_end(overlap: bool, waiting: list[int], prefill: int = 1) -> list[str]:
    """Return the requests that have left by the predicted end of a pass of 0.3 s that runs on
    ``p0``, in order."""
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=10.0, t_default_s=0.3)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    for index in range(prefill):
        up = InstanceUp(
            instance=f"p{index}", role="prefill", dp_size=1, chunk_tokens=1000, overlap=overlap
        )
        it.tell(up)
    it.arrive("first", 900)
    it.wait(0.02)
    it.report("p0", dp=1, kind="launch", forward_id=1, extend_tokens=900, rids=["first"])
    for number, tokens in enumerate(waiting):
        it.arrive(f"w{number}", tokens)
    it.wait(0.299)
    return [dispatch.rid for dispatch in it.dispatched if dispatch.prefill == "p0"]


@pytest.mark.parametrize("overlap", [False, True])
def test_at_saturation_the_pass_after_the_next_waits_in_the_engine_before_that_one_starts(
    overlap: bool,
):
    sent = sent_before_the_end(overlap, [950, 950, 950, 950, 950])
    assert sent == ["first", "w0", "w1"] if overlap else ["first", "w0"]


def test_with_little_more_than_a_pass_waiting_the_choice_is_kept():
    assert sent_before_the_end(True, [950, 700]) == ["first", "w0"]


@dataclass
class Instance:
    """The interface of an instance that :func:`lookahead` uses, with passes of 0.3 s that end at
    these times."""

    ends_s: list[float]
    backlog_tokens: int = 0
    capacity_tokens: int = 1000
    overlap: bool = True

    @property
    def ranks(self) -> Instance:
        return self

    @property
    def charged_tokens(self) -> int:
        return self.backlog_tokens

    def capacity_of(self, _mean_tokens: float) -> float:
        return self.capacity_tokens

    @property
    def passes(self) -> list[Pass]:
        return [Pass(end_s - 0.3, end_s, [900], None) for end_s in self.ends_s]


def asked(*instances: Instance, queue_tokens: int, now_s: float = 0.98):
    engines = cast(list[PrefillInstance], instances)
    found = lookahead(engines, queue_tokens, 100.0, 0.03, now_s)
    numbers = [instances.index(cast(Instance, a_pass.instance)) for a_pass in found.open]
    return numbers, found.wake_s


def test_the_batch_after_the_next_must_be_there_when_the_running_pass_ends():
    assert asked(Instance([1.0], 900), queue_tokens=1000) == ([0], math.inf)
    assert asked(Instance([1.0], 900), queue_tokens=1000, now_s=0.8) == ([], 0.97)


def test_what_other_instances_can_take_is_not_committed_ahead():
    full, free = Instance([1.0], 900), Instance([1.2])
    assert asked(full, free, queue_tokens=1900) == ([], math.inf)
    assert asked(full, free, queue_tokens=2000) == ([0], math.inf)
    assert asked(full, Instance([1.2], 950), queue_tokens=1100) == ([0], 1.17)


@pytest.mark.parametrize(("lead_s", "ahead"), [(0.0, 1), (0.1, 0)])
def test_arrivals_of_a_dispatch_lead_are_not_committed_ahead(lead_s: float, ahead: int):
    view = SimpleNamespace(
        urgent=False,
        lead_s=lead_s,
        at=Moment(1.0, lead_s),
        instances=[Instance([1.0], 900)],
        queue=SimpleNamespace(tokens=1000),
        learned=SimpleNamespace(
            lineup=SimpleNamespace(overlap=True, room_tokens=100),
            offered=SimpleNamespace(token_rate=1000.0, mean_tokens=100.0),
        ),
    )
    assert len(_ahead(cast(View, view)).open) == ahead


@pytest.mark.parametrize(
    ("instance", "wanted"),
    [
        (Instance([1.0]), False),  # its next pass is empty: that comes first
        (Instance([1.0], 1900), False),  # has both
        (Instance([1.0], 900, overlap=False), False),
        (Instance([], 900), False),  # about to start: too late
        (Instance([1.0, 1.3]), True),  # a pass is queued: the one behind it is formed at 1.0
        (Instance([1.0, 1.3], 900), False),
        (Instance([1.0, 1.3], 200), False),  # on its way
    ],
)
def test_instances_that_lack_a_batch_for_the_next_pass(instance: Instance, wanted: bool):
    found, _ = asked(instance, queue_tokens=10_000)
    assert found == [0] * wanted


@pytest.mark.parametrize("overlap", [False, True])
def test_behind_a_long_prompt_a_batch_is_there_when_the_running_pass_ends(overlap: bool):
    """While a chunk is queued on the device, the pass behind it is formed as soon as that chunk
    starts. A moment before the queued one ends is a pass too late."""
    it = Driver(policy="sbs", trigger="adaptive", max_hold_s=10.0, t_default_s=0.3)
    it.tell(InstanceUp(instance="d0", role="decode", dp_size=1))
    it.tell(
        InstanceUp(instance="p0", role="prefill", dp_size=2, chunk_tokens=1000, overlap=overlap)
    )
    for forward_id in range(1, 11):  # how long a pass takes
        it.arrive(f"warm{forward_id}", 1000)
        it.wait(0.02)
        tell_of_a_pass(it, "launch", forward_id, rids=[f"warm{forward_id}"])
        it.wait(0.3)
        tell_of_a_pass(it, "forward", forward_id, forward_s=0.3)
        tell_of_a_pass(it, "idle", forward_id)
        it.wait(0.1)
    it.arrive("long", 3000)
    it.wait(0.02)
    tell_of_a_pass(it, "launch", 11, rids=["long"], chunk_remainder_tokens=2000)
    tell_of_a_pass(it, "launch", 12, inflight_passes=1, chunk_remainder_tokens=1000)
    it.arrive("short", 500)
    it.wait(0.2)
    assert it.dispatched[-1].rid == "long"
    it.wait(0.099)
    assert it.dispatched[-1].rid == ("short" if overlap else "long")


def tell_of_a_pass(it: Driver, kind: str, forward_id: int, **fields: Any) -> None:
    """Both ranks of ``p0`` do, of a full chunk on the last request's; ``fields``: of that one."""
    busy = it.dispatched[-1].prefill_rank
    tokens = [1000 if rank == busy else 0 for rank in range(2)]
    for rank in range(2):
        own = fields if rank == busy else {}
        pass_s = {name: fields[name] for name in ("forward_s", "inflight_passes") if name in fields}
        it.report(
            *("p0", rank),
            kind=kind,
            forward_id=forward_id,
            extend_tokens=tokens[rank],
            tokens_per_rank=tokens,
            **{**pass_s, **own},
        )
