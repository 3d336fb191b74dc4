"""A front end that is asked for a request of another one asks the scheduler."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest
from link_harness import QUICK, World

from sglang_sbs.router.processes import messages
from sglang_sbs.router.processes.messages import AskStory, read_story
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.explained.stories import ClientAttempt, Story


async def asked(front_end, **fields) -> Story | None:
    done = await front_end.link.ask(AskStory(**fields))
    return read_story(done.payload)


async def test_the_scheduler_completes_what_a_front_end_knows(world: World) -> None:
    config = SchedulerConfig(policy="round_robin")
    await world.boot(scheduler=Scheduler(config, remembers=10))
    front_end = await world.front_end()
    placed = await front_end.ask("r")
    story = await asked(front_end, name="r", rids=["r", "unknown"])
    (attempt,) = story.attempts
    assert attempt.timeline.decision.prefill == placed.prefill
    assert [candidate.chosen for candidate in attempt.why.candidates] == [True]


async def test_a_request_of_another_front_end_is_found(world: World) -> None:
    await world.boot()
    first, second = await world.front_end(), await world.front_end()
    await first.ask("rid")
    story = Story(request_id="of the client", sent=[ClientAttempt("rid")])
    first.link.find = lambda name: story if name == "of the client" else None
    found = await asked(second, name="of the client")
    assert found.request_id == "of the client"
    assert [attempt.timeline.rid for attempt in found.attempts] == ["rid"]
    assert await asked(second, name="nobody's") is None
    by_rid = await asked(second, name="rid")
    assert [attempt.timeline.rid for attempt in by_rid.attempts] == ["rid"]


async def test_a_front_end_that_does_not_answer_is_not_waited_for(world: World) -> None:
    world.times = replace(QUICK, answer_s=0.01)
    await world.boot()
    first, second = await world.front_end(), await world.front_end()
    await first.ask("rid")
    for line in world.net._lines.values():
        if line._receive.__self__ is first.link:
            line._receive = lambda message: None
    found = await asyncio.wait_for(asked(second, name="rid"), 5)
    assert [attempt.timeline.rid for attempt in found.attempts] == ["rid"]


def test_what_another_release_writes_differently_is_no_story() -> None:
    assert read_story(b"") is None
    assert read_story(b'{"sent": 3}') is None
    assert read_story(msgspec.json.encode({"request_id": "r", "more": 1})).request_id == "r"


def test_messages_have_limits() -> None:
    frames = messages.encode(AskStory(call=1, name="x" * 513))
    with pytest.raises(messages.MalformedMessage):
        messages.decode_to_scheduler(frames)
