"""`scripts/compare-routers --workload agentic`: what agents send, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web
from compare_rows import row
from msgspec.structs import replace

from benchmarks.compare_routers.agents import Agents, Turn
from benchmarks.compare_routers.prompts import id_prompts
from benchmarks.compare_routers.results.measure import computed_tokens
from benchmarks.compare_routers.results.tables import agents_table
from benchmarks.compare_routers.runs.agents_client import Played, play
from benchmarks.compare_routers.workloads import TurnWords
from benchmarks.listener import ReceivedMessage
from sglang_sbs.wire import EndForward

CHUNK = 1024


def followed(agents: Agents, turns: int) -> list[Turn]:
    """The first so many, each answered after a second."""
    waiting, out = list(agents.first), []
    while len(out) < turns:
        turn = min(waiting)
        waiting.remove(turn)
        out.append(turn)
        waiting += agents.after(turn, turn.at_s + 1.0)
    return out


def test_agents_send_mostly_what_they_sent_before() -> None:
    agents = Agents(10, 3, CHUNK, 1.0)
    turns = followed(agents, 300)
    new = [agents.new_tokens(turn) for turn in turns]
    warm = range(60, 300)
    assert sum(new[n] for n in warm) < 0.15 * sum(turns[n].prompt_tokens for n in warm)
    assert new[0] == turns[0].prompt_tokens
    assert max(turn.prompt_tokens for turn in turns) <= 8 * CHUNK


def test_a_context_that_grows_keeps_its_words() -> None:
    agents = Agents(1, 3, CHUNK, 1.0)
    first, second = followed(agents, 2)
    words = TurnWords(id_prompts(), "x")
    before, two = (words(turn, number).input_ids for number, turn in enumerate((first, second)))
    shared = round(len(first.blocks) * first.block_tokens)
    assert shared > CHUNK and before[:shared] == two[:shared]
    assert (len(before), len(two)) == (first.prompt_tokens, second.prompt_tokens)
    assert TurnWords(id_prompts(), "y")(first, 0).input_ids[:16] != before[:16]


class Engine:
    """Answers after a while; knows what came while it had not answered."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.asked: list[list[int]] = []
        self.open: Counter[tuple[int, ...]] = Counter()
        self.at_once = 0

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids = body["input_ids"]
        agent = tuple(ids[:8])
        self.asked.append(ids)
        self.open[agent] += 1
        self.at_once = max(self.at_once, self.open[agent])
        await asyncio.sleep(0.01)
        self.open[agent] -= 1
        tokens = body["sampling_params"]["max_new_tokens"]
        event = f'{{"meta_info": {{"id": "x", "completion_tokens": {tokens}}}}}'
        return web.Response(status=self.status, text=f"data: {event}\n\n")


async def played(engine: Engine, agents: Agents, turns: int) -> Played:
    app = web.Application(client_max_size=2**24)
    app.router.add_post("/generate", engine.generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with asyncio.timeout(60):
            return await play(url, agents, TurnWords(id_prompts(), "x"), turns, timeout_s=10.0)
    finally:
        await runner.cleanup()


async def test_an_agent_sends_when_it_was_answered_and_first_turns_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Sub-agents begin with what their agent sent, and are its only turns at once.
    monkeypatch.setattr("sglang_sbs.simulator.workloads.agentic._BRANCH_SHARE", 0.0)
    engine = Engine()
    found = await played(engine, Agents(5, 1, CHUNK, 1e-3), 40)
    assert engine.at_once == 1
    assert [sample.error for sample in found.samples] == [""] * 40
    assert all(sample.at_s >= 0 for sample in found.samples)
    assert found.load_s == found.samples[-1].at_s
    assert len(engine.asked) >= 45
    assert found.warm_up_failed == 0
    prompt_tokens = sum(map(len, engine.asked))
    assert 0 < found.optimum_tokens < prompt_tokens / 2


async def test_agents_go_on_after_a_failure() -> None:
    found = await played(Engine(status=500), Agents(3, 1, CHUNK, 1e-3), 10)
    assert len(found.samples) == 10 and all("500" in sample.error for sample in found.samples)
    assert found.warm_up_failed >= 3


def test_what_prefill_computed_is_what_its_passes_had() -> None:
    def message_of(kind: str, role: str, boot: str, tokens: int) -> ReceivedMessage:
        report = EndForward(
            instance_id="", boot_id=boot, role=role, dp_rank=0, dp_size=1, seq=1, kind=kind
        )
        return ReceivedMessage(0.0, replace(report, extend_tokens=tokens))

    messages = [
        message_of("launch", "prefill", "a", 100),
        message_of("forward", "prefill", "a", 100),
        message_of("launch", "prefill", "b", 20),
        message_of("launch", "decode", "d", 3),
        message_of("launch", "prefill", "stranger", 500),
    ]
    assert computed_tokens(messages, {"a": "p0", "b": "p1", "d": "d0"}) == 120


def test_the_report_says_what_agents_had_computed() -> None:
    rows = [
        replace(a_row, key=replace(a_row.key, workload="agentic"), computed_over_optimum=ratio)
        for a_row, ratio in ((row("sbs", 50), 1.02), (row("smg", 100), 2.5))
    ]
    table = agents_table(rows)
    assert table is not None
    assert [(line[0], line[-1]) for line in table.rows] == [("sbs", "1.02"), ("smg", "2.50")]
    assert agents_table([row("sbs", 50)]) is None
