"""The timeline of a request, from the events alone."""

from __future__ import annotations

import pytest

from sglang_sbs.scheduling import (
    ClientSide,
    Dispatch,
    ForwardEnded,
    PrefillDone,
    Refuse,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.scheduling.explained import timelines
from sglang_sbs.scheduling.explained.timelines import Timeline, Timelines
from sglang_sbs.wire import EndForward
from sglang_sbs.wire.endforward import Started

CHUNK = 1000


class Watched:
    """Timelines, fed with one prefill rank's messages."""

    def __init__(self) -> None:
        self.timelines = Timelines()
        self.over: list[Timeline] = []
        self.timelines.ended = self.over.append

    def tell(self, now_s, event, *commands):
        self.timelines.observe(event, commands, now_s)

    def arrive(self, now_s, rid, tokens=100):
        self.tell(now_s, RequestArrived(rid=rid, prompt_tokens=tokens))

    def dispatch(self, now_s, rid, **more):
        fields = {"prefill": "p0", "prefill_rank": 1, "decode": "d0", "decode_rank": 0}
        command = Dispatch(rid=rid, **(fields | more), batch=1, held_s=0.0, reason="")
        self.tell(now_s, PrefillDone(rid="of somebody else"), command)

    def report(self, now_s, kind, forward_id, tokens, *started, **more):
        fields = {"instance_id": "p0", "boot_id": "b", "role": "prefill", "dp_size": 2, "seq": 0}
        report = EndForward(
            **(fields | more),
            dp_rank=1,
            kind=kind,
            forward_id=forward_id,
            extend_tokens=tokens,
            chunk_tokens=CHUNK,
            launch_s=1000.0,
            started=list(started),
        )
        self.tell(now_s, ForwardEnded(instance="p0", report=report))

    def end(self, now_s, rid, outcome="completed", **client):
        seen = ClientSide(request_id="of the client", **client) if client else None
        self.tell(now_s, RequestEnded(rid=rid, outcome=outcome, client=seen))


def test_every_part_of_the_time_to_the_first_token_is_distinguished():
    watched = Watched()
    watched.arrive(10.0, "r")
    watched.dispatch(10.4, "r")
    watched.report(10.5, "launch", 7, 100, Started("r", queued_s=999.95), age_s=0.01)
    watched.report(10.7, "forward", 7, 100, age_s=0.02)
    watched.tell(10.72, PrefillDone(rid="r"))
    watched.end(12.0, "r", admission_s=0.002, first_byte_s=0.75)
    (timeline,) = watched.over
    assert timeline.parts() == pytest.approx(
        {
            "admission": 0.002,
            "hold": 0.4,
            "way": 0.04,  # taken in at 10.44, 50 ms before the launch
            "queue": 0.05,
            "pass": 0.19,
            "decode": 0.07,
        }
    )
    assert timeline.ttft_s == pytest.approx(0.752)
    assert watched.timelines.get("r") is timeline


def test_a_prompt_of_several_chunks_is_computed_with_its_last_pass():
    watched = Watched()
    watched.arrive(10.0, "long", 2500)
    watched.dispatch(10.0, "long")
    watched.report(10.1, "launch", 1, CHUNK, Started("long"))
    for number, tokens in enumerate((1000, 1000, 500), 1):
        assert watched.timelines.get("long").computed_s is None
        watched.report(10.1 + number, "forward", number, tokens)
    assert watched.timelines.get("long").computed_s == pytest.approx(13.1)
    watched.report(14.1, "forward", 4, 300)  # of others, while its KV cache is sent
    watched.tell(14.2, PrefillDone(rid="long"))
    assert watched.timelines.get("long").computed_s == pytest.approx(13.1)


@pytest.mark.parametrize("estimate", [250, 600, 5000])
@pytest.mark.parametrize("names_finished", [True, False])
def test_a_short_prompt_that_is_cut_is_computed_with_its_second_pass(estimate, names_finished):
    watched = Watched()
    for rid, tokens in (("whole", 700), ("cut", estimate)):  # of which it has 600
        watched.arrive(10.0, rid, tokens)
        watched.dispatch(10.0, rid)
    started = Started("whole"), Started("cut")

    def ended(now_s, number, tokens, rid):
        finished = {"finished": [rid]} if names_finished else {}
        watched.report(now_s, "forward", number, tokens, **finished)

    watched.report(10.1, "launch", 1, CHUNK, *started, chunk_remainder_tokens=300)
    watched.report(10.2, "launch", 2, 300)  # overlap scheduling: nothing is left when a pass ends
    ended(11.1, 1, CHUNK, "whole")
    assert watched.timelines.get("whole").computed_s == pytest.approx(11.1)
    assert watched.timelines.get("cut").computed_s is None
    ended(12.1, 2, 300, "cut")
    watched.tell(12.2, PrefillDone(rid="cut"))
    assert watched.timelines.get("cut").computed_s == pytest.approx(12.1)


def test_a_rank_that_restarts_with_an_older_plugin_names_nothing():
    watched = Watched()
    for number, more in enumerate(({"finished": ["r0"]}, {}, {"boot_id": "older"})):
        rid = f"r{number}"
        watched.arrive(10.0, rid)
        watched.dispatch(10.0, rid)
        watched.report(10.1, "launch", number, 100, Started(rid))
        watched.report(10.2, "forward", number, 100, **more)
        watched.end(10.3, rid)
    computed = [timeline.computed_s for timeline in watched.over]
    assert computed == [pytest.approx(10.2), None, pytest.approx(10.2)]


def test_what_is_cached_is_not_computed():
    watched = Watched()
    watched.arrive(10.0, "r", 2500)
    watched.dispatch(10.0, "r", cached_tokens=2000)
    watched.report(10.1, "launch", 1, 500, Started("r"))
    watched.report(10.2, "forward", 1, 500)
    assert watched.timelines.get("r").computed_s == pytest.approx(10.2)


def test_passes_that_began_before_a_request_are_not_its_own():
    watched = Watched()
    watched.arrive(10.0, "r")
    watched.dispatch(10.0, "r")
    watched.report(10.1, "launch", 5, 100, Started("r"))
    watched.report(10.2, "forward", 4, 900)  # overlap scheduling: launched before, ends now
    assert watched.timelines.get("r").computed_s is None
    watched.report(10.3, "forward", 5, 100)
    assert watched.timelines.get("r").computed_s == pytest.approx(10.3)


def test_a_length_that_was_an_estimate_is_settled_by_the_answer():
    watched = Watched()
    watched.arrive(10.0, "r", 5000)  # it has 1,500
    watched.dispatch(10.0, "r")
    watched.report(10.1, "launch", 1, CHUNK, Started("r"))
    watched.report(10.2, "forward", 1, 1000)
    watched.report(10.3, "forward", 2, 500)
    watched.tell(10.4, PrefillDone(rid="r"))
    assert watched.timelines.get("r").computed_s == pytest.approx(10.3)


def test_the_answer_may_come_before_the_message_about_the_pass():
    watched = Watched()
    watched.arrive(10.0, "r")
    watched.dispatch(10.0, "r")
    watched.report(10.1, "launch", 1, 100, Started("r"))
    watched.tell(10.25, PrefillDone(rid="r"))
    watched.report(10.3, "forward", 1, 100, age_s=0.1)
    assert watched.timelines.get("r").computed_s == pytest.approx(10.2)


def test_without_reports_of_the_engine_its_parts_are_one():
    watched = Watched()
    watched.arrive(10.0, "r")
    watched.dispatch(10.1, "r")
    watched.tell(10.4, PrefillDone(rid="r"))
    watched.end(11.0, "r", admission_s=0.0, retries_s=0.3, first_byte_s=0.5)
    (timeline,) = watched.over
    expected = {"admission": 0.0, "retries": 0.3, "hold": 0.1, "engine": 0.3, "decode": 0.1}
    assert timeline.parts() == pytest.approx(expected)


def test_times_of_messages_never_make_a_part_negative():
    watched = Watched()
    watched.arrive(10.0, "r")
    watched.dispatch(10.1, "r")
    watched.report(10.2, "launch", 1, 100, Started("r", queued_s=10.0))  # 990 s before the launch
    watched.report(10.9, "forward", 1, 100)
    watched.tell(10.5, PrefillDone(rid="r"))
    watched.end(11.0, "r", first_byte_s=0.6)
    parts = watched.over[0].parts()
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(0.6)


def test_a_refusal_is_the_end():
    watched = Watched()
    refusal = Refuse(rid="r", cause="queue_full", retry_after_s=1.0, message="full")
    watched.tell(10.0, RequestArrived(rid="r", prompt_tokens=1), refusal)
    (timeline,) = watched.over
    assert (timeline.outcome, timeline.refusal) == ("refused", refusal)
    assert timeline.parts() == {}


def test_nothing_is_kept_of_what_is_long_over(monkeypatch):
    monkeypatch.setattr(timelines, "MOST_OPEN", 20)
    watched = Watched()
    watched.timelines = Timelines(most_over=10)
    for number in range(100):
        rid = f"r{number}"
        watched.arrive(10.0, rid)
        watched.dispatch(10.0, rid)
        watched.report(10.1, "launch", number, 100, Started(rid))
        watched.end(10.2, rid, "aborted")
    for number in range(100):
        watched.arrive(11.0, f"never ends {number}")
    assert len(watched.timelines) == 30
    assert watched.timelines.get("r89") is None
    assert watched.timelines.get("r90") is not None
    assert not any(watched.timelines._computing.values())


def test_unknown_requests_do_no_harm():
    watched = Watched()
    watched.report(10.0, "launch", 1, 100, Started("unknown"))
    watched.report(10.1, "forward", 1, 100)
    watched.tell(10.2, PrefillDone(rid="unknown"))
    watched.end(10.3, "unknown")
    assert watched.over == []


def test_a_prompt_aborted_on_another_rank_than_its_own_is_forgotten():
    """Engines that choose the rank themselves, and that report completed requests."""
    watched = Watched()
    watched.report(9.0, "forward", 1, 100, finished=["of before"])
    for number in range(3):
        watched.arrive(10.0, f"r{number}")
        watched.dispatch(10.0, f"r{number}", prefill_rank=0)
        watched.report(10.1, "launch", 2 + number, 100, Started(f"r{number}"))
        watched.end(10.2, f"r{number}", "aborted")
    assert not any(watched.timelines._computing.values())
