"""Objects met in a debugger or a traceback print their state in one line, without secrets."""

from __future__ import annotations

import asyncio

from router_harness import cluster, until

from sglang_sbs.router.relay.pair import Pair

KEY, PROMPT, LABEL = "the-key", "a prompt", "a label"


async def test_what_serves_a_request_prints_its_state_but_no_secret() -> None:
    headers = {"Authorization": f"Bearer {KEY}", "x-request-id": "mine"}
    async with cluster("--api-key", KEY, decode=2) as c:
        gate, server, scheduler = c.prefill[0].gate, c.server, c.scheduler
        for worker in server.registry:
            worker.labels["team"] = LABEL
            worker.problems["signal"] = LABEL
        in_flight = server.in_flight
        gate.close()
        scheduler.hold = True
        body = {"text": PROMPT, "rid": "client's"}
        task = asyncio.ensure_future(c.post("/generate", body, headers=headers).__aenter__())
        await until(lambda: scheduler.held)
        (attempt,) = in_flight._attempts.values()
        assert repr(attempt) == (
            f"<Attempt {attempt.rid}: attempt 1 at unit 0, waits for a decision>"
        )
        arrival = next(iter(scheduler.held.values()))
        server.dispatcher._on_decided(scheduler._place(arrival))
        await until(lambda: c.prefill[0].requests)
        (prefill,), decode = server.registry.of_role("prefill"), attempt.placement.decode
        pair = attempt.pair
        assert repr(pair) == f"<Pair {attempt.rid} to {prefill.url} and {decode.url}: sent>"
        assert repr(attempt) == f"<Attempt {attempt.rid}: attempt 1 at unit 0, {pair!r}>"
        assert repr(pair.prefill_call) == f"<Call to {prefill.url}: sent>"
        run = attempt.run
        assert repr(run.exchange) == "<Exchange mine: generate, units=1>"
        assert repr(run) == f"<UnitRun 0 of {run.exchange!r}: attempts=1>"
        assert repr(prefill) == (
            f"<Worker {prefill.url} (prefill): healthy, announced, signal; load=1>"
        )
        assert repr(prefill) in repr(server.registry)
        shown = (pair, attempt, run, run.exchange, pair.decode_call, server.registry)
        for text in map(repr, shown):
            assert "\n" not in text
            assert not any(secret in text for secret in (KEY, PROMPT, LABEL))
        built = Pair(attempt, pair.placement, in_flight, asks_cached=False)
        assert repr(built).endswith(": not sent>"), "building a pair sends nothing"
        gate.open()
        assert (await task).status == 200
        await c.settled()
        assert repr(pair).endswith("sent, opened, done, prefill over, decode over>")
