"""A worker that was removed leaves no metrics and no books behind, in no process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from router_harness import TIMEOUT_S, Cluster, cluster, options_for, until

from sglang_sbs.router.errors import transport_failure
from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry, state_of
from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.telemetry.metrics import RouterMetrics
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker, WorkerEvents
from sglang_sbs.scheduling import Scheduler, SchedulerConfig
from sglang_sbs.scheduling.events import Dispatch
from tools.stand_ins.mock_engine import Behaviour, MockEngine, Rooms

ERRORS, DISPATCHES = "smg_worker_errors_total", "sbs_dispatches_total"


def series(text: str, worker_url: str) -> dict[str, float]:
    """Return one worker's series by name, each summed over its other labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if f'worker="{worker_url}"' in line:
            name = line.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(line.rpartition(" ")[2])
    return found


class Counted:
    """A registry, and the metrics that follow it."""

    def __init__(self) -> None:
        self.metrics = metrics = RouterMetrics(knows=lambda url: self.registry.get(url) is not None)
        self.registry = Registry(WorkerEvents(removed=lambda worker: metrics.forget(worker.url)))

    def of(self, worker_url: str) -> dict[str, float]:
        return series(self.metrics.render().decode(), worker_url)

    def add(self, number: int) -> tuple[Worker, Worker]:
        prefill = self.registry.add(f"http://p{number}:1", "prefill")
        return prefill, self.registry.add(f"http://d{number}:1", "decode")


def use(metrics: RouterMetrics, prefill: str, decode: str) -> None:
    """Everything that is counted by worker as it happens."""
    for rank in (0, 1):
        metrics.on_decided(
            Dispatch(
                rid="r",
                prefill=prefill,
                prefill_rank=rank,
                decode=decode,
                decode_rank=rank,
                batch=1,
                held_s=0.0,
                reason="",
            )
        )
    metrics.leg_failed(transport_failure("prefill", prefill, "gone", unreachable=True))
    metrics.leg_failed(transport_failure("decode", decode, "gone", unreachable=True))
    metrics.on_forward_ended(prefill, 1024, MockEngine("prefill").report(0, forward_s=0.1))


def test_workers_that_come_and_go_leave_nothing() -> None:
    counted = Counted()
    stays = counted.add(0)
    use(counted.metrics, *(worker.url for worker in stays))
    for number in range(1, 20):
        pair = counted.add(number)
        use(counted.metrics, *(worker.url for worker in pair))
        for worker in pair:
            assert counted.of(worker.url)[DISPATCHES] == 2
            assert counted.of(worker.url)[ERRORS] == 1
            counted.registry.remove(worker)
    page = counted.metrics.render().decode()
    left = [line for line in page.splitlines() if 'worker="' in line]
    assert left and all(any(worker.url in line for worker in stays) for line in left)
    assert len(counted.metrics._of_workers) == 2
    assert counted.of(stays[0].url)["sbs_forward_seconds_count"] == 1
    assert next(iter(counted.metrics.selections("m").samples)).value == 40


def test_what_ends_after_the_removal_is_not_counted_and_the_next_one_begins_at_0() -> None:
    counted = Counted()
    prefill, decode = counted.add(0)
    use(counted.metrics, prefill.url, decode.url)
    counted.registry.remove(prefill)
    use(counted.metrics, prefill.url, decode.url)
    assert counted.of(prefill.url) == {}
    assert counted.of(decode.url)[DISPATCHES] == 4
    counted.registry.add(prefill.url, "prefill")
    use(counted.metrics, prefill.url, decode.url)
    assert counted.of(prefill.url)[DISPATCHES] == 2
    assert counted.of(prefill.url)[ERRORS] == 1


def test_a_front_end_forgets_what_the_scheduler_process_names_no_more() -> None:
    there = Registry()
    prefill = there.add("http://p0:1", "prefill")
    decode = there.add("http://d0:1", "decode")
    metrics = RouterMetrics(knows=lambda url: here.get(url) is not None)
    events = WorkerEvents(removed=lambda worker: metrics.forget(worker.url))
    here = MirroredRegistry(events, BreakerConfig())
    here.follow(state_of(worker, 0.0) for worker in there)
    use(metrics, prefill.url, decode.url)
    here.follow([state_of(decode, 0.0)])
    page = metrics.render().decode()
    assert series(page, prefill.url) == {}
    assert series(page, decode.url)[DISPATCHES] == 2
    # The same address in the other role is another worker.
    there.remove(decode)
    here.follow([state_of(there.add(decode.url, "prefill"), 0.0)])
    assert series(metrics.render().decode(), decode.url) == {}


async def remove(c: Cluster, worker: Worker) -> None:
    async with c.client.delete(f"{c.url}/workers/{worker.id}") as answer:
        assert answer.status == 202


async def test_a_leg_that_fails_after_its_worker_was_removed() -> None:
    real = Scheduler(SchedulerConfig())
    async with cluster("--disable-retries", scheduler=real) as c:
        engine = c.decode[0]
        watch = c.server.scheduler._watch

        def registered() -> Worker:
            worker = c.server.registry.get(engine.url)
            assert worker is not None
            return worker

        def shown() -> dict[str, float]:
            return series(c.server.metrics.render().decode(), engine.url)

        def report() -> None:
            for rank in range(engine.dp_size):
                message = engine.report(rank, running_requests=1)
                assert c.server.registry.reported(registered(), message)
                watch._reported(registered(), message)

        assert (await c.generate(text="x"))[0] == 200
        report()
        before = shown()
        assert before[DISPATCHES] == 1
        assert {"sbs_ledger_drift_requests", "sbs_rank_kv_tokens"} <= before.keys()
        engine.gate.close()
        engine.behaviours.append(Behaviour(status=500))
        running = asyncio.create_task(c.generate(text="x"))
        await engine.received(2)
        removed = registered()
        await remove(c, removed)
        assert shown() == {}
        engine.gate.open()
        assert (await running)[0] == 500
        await c.settled()
        assert removed.active == 0
        assert shown() == {}

        body = {"url": engine.url, "worker_type": "decode"}
        async with c.post("/workers", body) as answer:
            assert answer.status == 202
        await until(lambda: registered().usable)
        assert DISPATCHES not in shown()
        assert "sbs_ledger_drift_requests" not in shown(), "its engine has not said anything yet"
        assert (await c.generate(text="x"))[0] == 200
        assert shown()[DISPATCHES] == 1
        report()
        assert "sbs_ledger_drift_requests" in shown()


async def test_with_several_processes_no_page_has_it_any_more(tmp_path: Path) -> None:
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    for engine in (prefill, decode):
        await engine.start()
    endpoint = ("--sbs-scheduler", f"ipc://{tmp_path}/s", "--policy", "round_robin")

    def options(role: str, *flags: str):
        return options_for([prefill], [decode], "--sbs-role", role, *endpoint, *flags)

    scheduler = SchedulerProcess(options("scheduler"))
    front_ends = [RouterServer(options("front-end", "--disable-retries")) for _ in range(2)]
    client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))

    async def shown() -> dict[str, float]:
        url = f"http://127.0.0.1:{scheduler.prometheus_port}/metrics"
        async with client.get(url) as answer:
            return series(await answer.text(), decode.url)

    try:
        await scheduler.start()
        for front_end in front_ends:
            await front_end.start()
        for front_end in front_ends:
            await until(lambda here=front_end: here.registry.ready)
            decode.behaviours.append(Behaviour(status=500))
            url = f"http://127.0.0.1:{front_end.port}/generate"
            async with client.post(url, json={"text": "x"}) as answer:
                assert answer.status == 500
        counted = await shown()
        assert (counted[ERRORS], counted[DISPATCHES]) == (2, 2)
        dead, alive = front_ends
        await dead.stop(grace_s=0.0)
        front_ends.remove(dead)
        await until(lambda: scheduler.front_ends == 1)
        assert (await shown())[ERRORS] == 2, "what a dead front end counted still happened"

        worker = alive.registry.get(decode.url)
        assert worker is not None
        await alive.scheduler.remove_worker(worker)
        await until(lambda: alive.registry.get(decode.url) is None)
        assert series(alive.metrics.render().decode(), decode.url) == {}
        assert await shown() == {}

        await alive.scheduler.add_worker(decode.url, "decode", None)
        await until(lambda: alive.registry.ready)
        again = await shown()
        assert "smg_worker_health" in again
        assert not {ERRORS, DISPATCHES} & again.keys()
    finally:
        await client.close()
        for front_end in front_ends:
            await front_end.stop(grace_s=0.0)
        await scheduler.stop()
        for engine in (prefill, decode):
            await engine.stop()


async def test_a_worker_removed_since_the_last_message_of_a_front_end_does_not_come_back(
    tmp_path: Path,
) -> None:
    prefill, decode = MockEngine("prefill"), MockEngine("decode")
    prefill.port, decode.port = 1, 2  # nothing need listen there
    flags = ("--sbs-role", "scheduler", "--sbs-scheduler", f"ipc://{tmp_path}/s")
    scheduler = SchedulerProcess(options_for([prefill], [decode], *flags))
    await scheduler.start()
    try:
        front_end = RouterMetrics()
        use(front_end, "http://gone:1", decode.url)
        hub = scheduler._hub
        hub._pages.put("front end", front_end.render().decode())
        hub._pages.left("front end")
        [counters] = await hub.metrics_pages()
        assert series(counters, "http://gone:1") == {}
        assert series(counters, decode.url)[ERRORS] == 1
        assert "sbs_hold_seconds_count 2.0" in counters
    finally:
        await scheduler.stop()
