"""The router with the real scheduler, also as the process users start."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_harness import TIMEOUT_S, cluster, options_for, sse_events, until

from sglang_sbs.router.server import RouterServer
from sglang_sbs.scheduling import Dispatch, Scheduler, SchedulerConfig, policy_names
from sglang_sbs.scheduling.eventlog import read_event_log
from tools.stand_ins.mock_engine import MockEngine, Rooms


@pytest.mark.parametrize("policy", policy_names())
async def test_every_policy_serves_every_request(policy: str) -> None:
    scheduler = Scheduler(SchedulerConfig(policy=policy))  # type: ignore[arg-type]
    async with cluster(prefill=3, decode=1, scheduler=scheduler) as c:

        async def ask(number: int) -> None:
            body = {"input_ids": [1] * (50 + number), "stream": number % 2 == 0}
            async with c.post("/generate", body) as response:
                assert response.status == 200
                await response.read()

        await asyncio.gather(*(ask(n) for n in range(60)))
        await c.settled()
        snapshot = scheduler.snapshot(0.0)
        assert (snapshot.queue_requests, snapshot.in_flight_requests) == (0, 0)
        for engine in c.prefill:
            for request in engine.requests:
                rank = request.body["routed_dp_rank"]
                assert request.body["bootstrap_room"] % 2 == rank


async def test_sbs_with_endforward_reports_its_tier_in_the_metrics() -> None:
    scheduler = Scheduler(SchedulerConfig())
    async with cluster(prefill=2, scheduler=scheduler, sbs_block=True) as c:
        for engine in (*c.prefill, *c.decode):
            engine.connect_publisher(str(c.server.endforward_endpoint))

        def every_rank_reported() -> bool:
            for engine in (*c.prefill, *c.decode):
                for rank in range(engine.dp_size):
                    engine.publish(engine.report(rank, kind="idle", chunk_tokens=1024))
            return all(len(w.last_report_s) == w.dp_size for w in c.server.registry)

        await until(every_rank_reported)
        assert (await c.generate(text="hello"))[0] == 200
        url = f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
        async with c.client.get(url) as response:
            text = await response.text()
        for engine in c.prefill:
            assert f'sbs_signal_tier{{tier="endforward",worker="{engine.url}"}} 1.0' in text or (
                f'worker="{engine.url}"' in text and "sbs_signal_tier" in text
            )
        assert "sbs_rank_c_avail_tokens" in text


async def test_a_worker_without_a_barrier_is_one_worker_to_everybody() -> None:
    """Its ranks are instances of their own in the scheduler alone."""
    scheduler = Scheduler(SchedulerConfig(policy="least_tokens"))
    async with cluster(scheduler=scheduler, sbs_block=True, prefill_says={"dwdp_size": 2}) as c:
        (engine,) = c.prefill
        assert set(scheduler.prefill) == {f"{engine.url} rank {rank}" for rank in range(2)}
        engine.connect_publisher(str(c.server.endforward_endpoint))

        def received() -> bool:
            engine.publish(engine.report(1, kind="launch", forward_id=7, extend_tokens=1000))
            return scheduler.prefill[f"{engine.url} rank 1"].tier == "endforward"

        bodies = [{"input_ids": [1] * 50, "stream": number % 2 == 0} for number in range(20)]

        async def ask(body: dict[str, Any]) -> None:
            async with c.post("/generate", body) as response:
                assert response.status == 200
                await response.read()

        await asyncio.gather(*map(ask, bodies))
        await until(received)
        await c.settled()
        ranks = [request.body["routed_dp_rank"] for request in engine.requests]
        rooms = [request.body["bootstrap_room"] % 2 for request in engine.requests]
        assert set(ranks) == {0, 1}
        assert rooms == ranks
        assert scheduler.prefill[f"{engine.url} rank 0"].tier != "endforward"
        async with c.get("/workers") as response:
            listed = (await response.json())["workers"]
        (shown,) = [worker for worker in listed if worker["url"] == engine.url]
        assert (shown["ranks"], shown["barrier"]) == ("2 ranks, no barrier (--dwdp-size 2)", False)
        url = f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
        async with c.client.get(url) as response:
            text = await response.text()
        for rank in range(2):
            assert f'sbs_rank_c_avail_tokens{{dp_rank="{rank}",worker="{engine.url}"}}' in text
        assert "rank 1" not in text


async def test_the_process_serves_logs_and_stops(tmp_path: Path) -> None:
    rooms = Rooms()
    prefill = MockEngine("prefill", rooms=rooms)
    decode = MockEngine("decode", rooms=rooms)
    await prefill.start()
    await decode.start()
    log = tmp_path / "events.log"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_sbs.launch_router", "--pd-disaggregation"),
        *("--prefill", prefill.url, "8998", "--decode", decode.url, "--policy", "sbs"),
        *("--host", "127.0.0.1", "--port", "0", "--prometheus-port", "0"),
        *("--prometheus-host", "127.0.0.1", "--sbs-endforward-bind", "tcp://127.0.0.1:*"),
        *("--sbs-event-log", str(log), "--cache-threshold", "0.5"),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stderr is not None
    lines: list[str] = []
    try:
        async with asyncio.timeout(60):
            while "policy sbs at" not in (lines[-1] if lines else ""):
                line = (await process.stderr.readline()).decode()
                assert line, "".join(lines)
                lines.append(line)
            port = int(lines[-1].split("policy sbs at ")[1].split(",")[0].rsplit(":", 1)[1])
            url = f"http://127.0.0.1:{port}"
            timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
            async with aiohttp.ClientSession(timeout=timeout) as client:
                while True:
                    async with client.get(url + "/readiness") as response:
                        if response.status == 200:
                            break
                    await asyncio.sleep(0.05)
                body: dict[str, Any] = {"prompt": "hello", "stream": True}
                async with client.post(url + "/v1/completions", json=body) as response:
                    assert sse_events(await response.read())[-1] == "[DONE]"
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await prefill.stop()
        await decode.stop()
    assert any("--cache-threshold has no effect" in line for line in lines)
    header, *records = read_event_log(log)
    assert header.config is not None
    replayed = Scheduler(header.config)
    for record in records:
        assert record.event is not None
        assert replayed.handle(record.event, record.now_s) == record.commands
    assert sum(isinstance(c, Dispatch) for record in records for c in record.commands) == 1


async def test_a_prefill_instance_that_is_back_soon_is_called_by_another_spelling() -> None:
    scheduler = Scheduler(SchedulerConfig(policy="round_robin"))
    async with cluster("--disable-retries", scheduler=scheduler, sbs_block=True) as c:
        assert (await c.generate(text="before"))[0] == 200
        port = c.prefill[0].port
        await c.prefill[0].stop()
        assert (await c.generate(text="meanwhile"))[0] == 502
        await c.prefill[0].restart(port)
        await until(lambda: c.server.registry.ready)
        assert (await c.generate(text="after"))[0] == 200
        for engine in (*c.prefill, *c.decode):
            first, *_, last = engine.requests
            assert first.body["bootstrap_host"] == "127.0.0.1"
            assert_another_spelling(last.body["bootstrap_host"], "127.0.0.1")
            assert last.body["bootstrap_port"] == first.body["bootstrap_port"]


def assert_another_spelling(spelled: str, host: str) -> None:
    assert spelled != host
    assert socket.inet_aton(spelled) == socket.inet_aton(host)


async def test_a_router_that_starts_spells_as_the_one_before_would_have() -> None:
    """Else decode would take the process that came back meanwhile for the one before."""
    async with cluster(scheduler=Scheduler(SchedulerConfig()), sbs_block=True) as c:
        assert (await c.generate(text="before"))[0] == 200
        await c.server.stop(grace_s=0.0)
        await c.prefill[0].restart()
        for _ in range(2):
            options = options_for(c.prefill, c.decode)
            server = RouterServer(options, Scheduler(SchedulerConfig()))
            await server.start()
            try:
                await until(lambda server=server: server.registry.ready)  # type: ignore[misc]
                url = f"http://127.0.0.1:{server.port}/generate"
                async with c.client.post(url, json={"text": "after"}) as response:
                    assert response.status == 200
            finally:
                await server.stop(grace_s=0.0)
        before, *after = (r.body["bootstrap_host"] for r in c.decode[0].requests)
        assert before == "127.0.0.1"
        assert_another_spelling(after[0], before)
        assert after == [after[0]] * 2


async def test_when_the_only_decode_instance_dies_waiting_requests_are_refused_at_once() -> None:
    # The paper's trigger sends one batch and waits an interval: what comes then is held for long.
    scheduler = Scheduler(SchedulerConfig(trigger="paper", t_default_s=1000.0, outage_hold_s=0.0))
    async with cluster(prefill=1, scheduler=scheduler) as c:
        c.prefill[0].gate.close()
        c.decode[0].gate.close()
        asked = [asyncio.create_task(c.generate(input_ids=[1] * 50)) for _ in range(8)]
        await until(lambda: len(c.decode[0].requests) + len(scheduler.queue) == 8)
        assert len(scheduler.queue) >= 1
        await c.decode[0].stop()
        answers = await asyncio.gather(*asked)
        assert {(status, body["error"]["code"]) for status, body in answers} == {
            (503, "no_decode_servers")
        }
        await c.settled()
        c.prefill[0].gate.open()
        snapshot = scheduler.snapshot(0.0)
        assert (snapshot.queue_requests, snapshot.in_flight_requests) == (0, 0)
