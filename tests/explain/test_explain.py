"""``sglang-sbs why`` and ``sglang-sbs log``: sentences and figures that people get."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from harness.why_cluster import Cluster
from router_harness import cluster

from sglang_sbs.cli import main
from sglang_sbs.explain import words
from sglang_sbs.explain.page import page
from sglang_sbs.scheduling import ClientSide, Dispatch, Refuse, Scheduler, SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.scheduling.events import RequestEnded
from sglang_sbs.scheduling.explained.decisions import CandidateInstance, Why
from sglang_sbs.scheduling.explained.stories import AttemptStory, ClientAttempt, Story
from sglang_sbs.scheduling.explained.timelines import Timeline
from sglang_sbs.scheduling.reasons import Opening, Term, Waited, WaitReason

P0, P1 = "http://p0:1", "http://p1:1"


def a_story() -> Story:
    """Held for 412 ms, then a pass of 180 ms."""
    decision = Dispatch(
        rid="rid",
        prefill=P1,
        prefill_rank=3,
        decode="http://d0:1",
        decode_rank=1,
        batch=7,
        held_s=0.412,
        reason="",
        decode_cached_tokens=1600,
    )
    timeline = Timeline(
        rid="rid",
        arrived_s=100.0,
        prompt_tokens=1843,
        decision=decision,
        decided_s=100.412,
        accepted_s=100.418,
        launched_s=100.436,
        computed_s=100.616,
        prefilled_s=100.63,
        ended_s=103.0,
        outcome="completed",
        completion_tokens=250,
        client=ClientSide("of the client", 0.002, 0.0, 0.64),
    )
    why = Why(
        rid="rid",
        prompt_tokens=1843,
        arrived_s=100.0,
        waits=[
            Waited(WaitReason.NOT_YET, 100.0, P1, 100.43),
            Waited(WaitReason.SHARE_FULL, 100.12),
        ],
        batches=1,
        decided_s=100.412,
        opening=Opening.ABOUT_TO_END,
        term=Term.SOONEST,
        candidates=[
            CandidateInstance(P1, 0.018, 0.205, 0.035, 0, chosen=True),
            CandidateInstance(P0, 0.12, 0.3, 0.0, 512),
        ],
        instances=2,
        waiting=5,
        launch_s=100.43,
        end_s=100.61,
    )
    sent = [ClientAttempt("rid", outcome="completed")]
    return Story(
        "of the client", "chat", 1.7e9, 1, 200, 3.002, [], sent, [AttemptStory(timeline, why)]
    )


PAGE = """\
Request of the client (chat) arrived at 2023-11-14 22:13:20.000 UTC.
It has 1,843 prompt tokens. The router sent it as rid rid.
It was answered with status 200 after 3,002 ms.
Its first token came after 642 ms.
It was completed with 250 tokens.

Where the time to its first token went
  admission                          2.0 ms
  hold in the scheduler              412 ms  ###################
  way to the engine                  6.0 ms
  queue of the engine                 18 ms  #
  forward pass                       180 ms  ########
  KV transfer, first decode step      24 ms  #

It was held 412 ms by the scheduler, because
  at first every prefill instance was busy; http://p1:1 was expected to be ready first, at +430 ms.
  from +120 ms on a batch left without it, because that forward pass had its share of the queue.
  meanwhile 1 batch of other requests left.

It was sent to http://p1:1 DP rank 3
  It is decoded on http://d0:1 DP rank 1, which has 1,600 tokens of its prompt.
  Why then: the running forward pass of the instance was about to end, and a batch must be \
there by then to be in the next one.
  Why there: of 2 prefill instances, the next forward pass of http://p1:1 starts first.
  Predicted when it was sent, from then on, without the rest of its batch (-> chosen):
     instance     pass starts  prompt done  delays others  cached
  -> http://p1:1       +18 ms      +205 ms          35 ms       0
     http://p0:1      +120 ms      +300 ms         0.0 ms     512
  Predicted with its batch, and real, in times from its arrival at the scheduler:
    forward pass started: predicted +430 ms, real +436 ms (6.0 ms later)
    prompt was computed: predicted +610 ms, real +616 ms (6.0 ms later)
"""


def test_the_page_has_what_was_asked_and_nothing_else() -> None:
    assert page(a_story()) == PAGE


def test_a_request_that_still_waits_says_for_what() -> None:
    timeline = Timeline("rid", 100.0, 50)
    waits = [Waited(WaitReason.NO_DECODE_ROOM, 100.0)]
    why = Why("rid", 50, 100.0, waits)
    text = page(Story(attempts=[AttemptStory(timeline, why, 102.5)]))
    assert (
        "It still waits, for 2,500 ms now, because\n  at first no decode DP rank had room" in text
    )
    assert "It was sent" not in text


def test_a_refusal_has_its_cause_and_what_the_request_waited_for() -> None:
    refusal = Refuse(
        rid="rid", cause="deadline", retry_after_s=1.0, message="not scheduled in 60 s"
    )
    timeline = Timeline("rid", 100.0, 50, refusal=refusal, ended_s=160.0, outcome="refused")
    why = Why("rid", 50, 100.0, [Waited(WaitReason.NO_DECODE_ROOM, 100.0)])
    text = page(Story(attempts=[AttemptStory(timeline, why)]))
    assert "The scheduler refused it after 60.0 s (deadline): not scheduled in 60 s." in text
    assert "no decode DP rank had room" in text


def test_attempts_that_failed_are_shown_with_why() -> None:
    story = a_story()
    story.sent.insert(0, ClientAttempt("first", 0, "prefill_unavailable: gone", "failed"))
    story.attempts.insert(0, AttemptStory(Timeline("first", 99.0, 1843, outcome="failed")))
    text = page(story)
    assert "Attempt 1 of 2: rid first\nThe attempt failed: prefill_unavailable: gone." in text
    assert "Attempt 2 of 2: rid rid" in text


def test_a_place_that_is_no_better_in_time_is_not_said_to_be() -> None:
    def said(gain_s: float | None) -> str:
        waited = Waited(WaitReason.BETTER_ELSEWHERE, 0.0, "http://p1:1", None, gain_s)
        return words.wait(waited, 0.0)

    assert " by 224 ms, " in said(0.224)
    assert said(-0.224) == said(0.0) == said(None)
    assert " by " not in said(-0.224)


def test_every_word_of_the_vocabulary_has_a_sentence_of_its_own() -> None:
    why = a_story().attempts[0].why
    assert why is not None
    openings = {words.opening(msgspec.structs.replace(why, opening=kind)) for kind in Opening}
    terms = {words.term(msgspec.structs.replace(why, term=kind)) for kind in Term}
    waits = {words.wait(Waited(reason, 100.0), 100.0) for reason in WaitReason}
    assert len(openings) == len(Opening)
    assert len(terms) == len(Term)
    assert len(waits) == len(WaitReason)
    assert not [text for text in (*openings, *terms, *waits) if not text]


# Event logs -------------------------------------------------------------------------------------


class Logged(Cluster):
    """Writes the event log that a router would."""

    def __init__(self, path: Path, seed: int = 1) -> None:
        self._log: EventLogWriter | None = None
        super().__init__(seed)
        self._log = EventLogWriter(path, self.config)
        written, self.events = self.events, []
        self.scheduler = Scheduler(self.config, remembers=10_000)
        for now_s, event in written:
            self.now_s = now_s
            self.tell(event)

    def tell(self, event) -> None:
        if isinstance(event, RequestEnded):
            client = ClientSide(f"client {event.rid}", 0.001, 0.0, 0.3)
            event = msgspec.structs.replace(event, client=client)
        handle = self.scheduler.handle

        def logged(event, now_s):
            commands = handle(event, now_s)
            if self._log is not None:
                self._log.write(now_s, event, commands)
            return commands

        self.scheduler.handle = logged  # type: ignore[method-assign]
        try:
            super().tell(event)
        finally:
            self.scheduler.handle = handle  # type: ignore[method-assign]

    def written(self, requests: int) -> Logged:
        self.run(requests)
        assert self._log is not None
        self._log.close()
        return self


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Logged]:
    path = tmp_path_factory.mktemp("log") / "router.events"
    return path, Logged(path).written(100)


def test_a_log_explains_as_the_scheduler_that_wrote_it(logged, capsys) -> None:
    path, cluster = logged
    held = max(cluster.sent, key=lambda sent: sent.held_s)
    for name in (held.rid, f"client {held.rid}"):
        assert main(["why", name, "--log", str(path), "--json"]) == 0
        story = json.loads(capsys.readouterr().out)
        why = cluster.scheduler.why(held.rid, cluster.now_s)
        (attempt,) = story["attempts"]
        assert attempt["why"] == json.loads(msgspec.json.encode(why))
        assert story["request_id"] == f"client {held.rid}"
    assert main(["why", held.rid, "--log", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"It was held {words.ms(held.held_s)} by the scheduler, because\n  at first " in text
    assert f"It was sent to {held.prefill} DP rank {held.prefill_rank}\n" in text


def test_a_log_of_a_release_that_decides_otherwise_is_shown_as_it_was(tmp_path, capsys) -> None:
    cluster = Logged(tmp_path / "one", seed=2).written(30)
    path = tmp_path / "other"
    log = EventLogWriter(path, SchedulerConfig(policy="round_robin", t_default_s=0.2))
    again = Scheduler(cluster.config)
    for now_s, event in cluster.events:
        log.write(now_s, event, again.handle(event, now_s))
    log.close()
    rid = cluster.sent[-1].rid
    assert main(["why", rid, "--log", str(path)]) == 0
    printed = capsys.readouterr()
    assert "decides differently" in printed.err
    assert "a log of\n  another release can be replayed" in printed.out


def test_a_log_is_shown_with_its_figures_and_slowest_requests(logged, capsys) -> None:
    path, cluster = logged
    assert main(["log", str(path), "--slowest", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}: ")
    assert f"{len(cluster.events):,} events, policy sbs, trigger adaptive" in lines[0]
    assert "3 prefill instances: p0 (2 DP ranks), p1 (2 DP ranks), p2 (2 DP ranks)" in lines
    assert "100 attempts at requests: 100 completed" in lines
    assert "time to the first token: p50 301 ms, p99 301 ms" in lines
    held = sorted(sent.held_s for sent in cluster.sent)
    assert f"held by the scheduler: p50 {words.ms(held[50])}, p95 {words.ms(held[95])}" in lines
    assert (
        len(lines[lines.index(next(line for line in lines if line.startswith("The slowest"))) :])
        == 5
    )
    assert main(["log", str(path), "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 100
    assert shown[0]["parts"]["admission"] == 0.001


@pytest.mark.parametrize("verb", [["why", "r", "--log"], ["log"]])
def test_what_is_no_log_is_named(verb, tmp_path, capsys) -> None:
    path = tmp_path / "no.events"
    path.write_bytes(b"something else")
    assert main([*verb, str(path)]) == 1
    assert "is not an sglang-sbs event log" in capsys.readouterr().err
    assert main([*verb, str(tmp_path / "missing")]) == 1
    assert "missing" in capsys.readouterr().err


def test_an_unknown_request_is_an_error(logged, capsys) -> None:
    assert main(["why", "nobody", "--log", str(logged[0])]) == 1
    assert "has no request nobody" in capsys.readouterr().err


# A router ---------------------------------------------------------------------------------------


async def test_a_router_is_asked_with_the_key_of_its_admin(capsys, monkeypatch) -> None:
    monkeypatch.delenv("SGLANG_SBS_ADMIN_KEY", raising=False)
    scheduler = Scheduler(SchedulerConfig(), remembers=10)
    async with cluster("--admin-api-key", "boss", scheduler=scheduler) as c:
        headers = {"x-request-id": "chat/1?a"}
        async with c.post("/generate", {"text": "x"}, headers=headers) as response:
            await response.read()

        async def asked(*words: str) -> int:
            return await asyncio.to_thread(main, ["why", *words, "--router", c.url])

        assert await asked("chat/1?a", "--admin-api-key", "boss") == 0
        text = capsys.readouterr().out
        assert text.startswith("Request chat/1?a (generate) arrived at ")
        assert "Why then: the instance was idle." in text
        assert await asked("chat/1?a") == 1
        assert "SGLANG_SBS_ADMIN_API_KEY" in capsys.readouterr().err
        assert await asked("chat/1?a", "--admin-api-key", "wrong") == 1
        assert "not accepted" in capsys.readouterr().err
        monkeypatch.setenv("SGLANG_SBS_ADMIN_KEY", "boss")
        assert await asked("unknown") == 1
        assert "remembers no request unknown" in capsys.readouterr().err
    assert await asyncio.to_thread(main, ["why", "x", "--router", c.url]) == 1
    assert "is the router there?" in capsys.readouterr().err


def test_a_request_that_was_held_without_a_recorded_reason_did_not_leave_at_once() -> None:
    """``--sbs-trigger paper`` records none."""
    story = a_story()
    attempt = story.attempts[0]
    assert attempt.why is not None
    attempt.why = msgspec.structs.replace(attempt.why, waits=[], opening=Opening.INTERVAL)
    shown = page(story)
    assert "It was held 412 ms by the scheduler, for reasons that are not recorded." in shown
    assert "not held" not in shown
    attempt.timeline.decided_s = attempt.timeline.arrived_s
    assert "It was not held (0.0 ms): it left as soon as it arrived." in page(story)
