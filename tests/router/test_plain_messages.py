"""The router's messages when it cannot start, when it ends, and when a worker does not answer."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator

import aiohttp
import pytest
from router_harness import cluster, until
from router_processes import START_S, site, start_group

from sglang_sbs.console.plain_words import counted, plain_error
from sglang_sbs.dashboard.health.alerts import Recent, find_alerts
from sglang_sbs.launch_router import main
from sglang_sbs.scheduling import Scheduler, SchedulerConfig

WORKERS = ("--prefill", "http://127.0.0.1:9", "9000", "--decode", "http://127.0.0.1:10")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port where somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("flag", ["--port", "--prometheus-port", "--sbs-endforward-bind"])
async def test_a_port_in_use_is_reported_with_its_flag(flag: str, workers: str, taken: int) -> None:
    value = f"tcp://127.0.0.1:{taken}" if flag.endswith("bind") else str(taken)
    said = await why_it_does_not_start("--workers", workers, flag, value)
    assert re.search(rf"start: {flag} {value}: .*[Aa]ddress already in use", said)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("--host", "192.0.2.77", "cannot listen there: Cannot assign requested address"),
        ("--host", "nobody.invalid", "cannot listen there: "),
        ("--prometheus-host", "nobody.invalid", "cannot listen there: "),
        ("--log-dir", "/dev/null/logs", "Not a directory"),
        ("--sbs-event-log", "/dev/null/log", "Not a directory"),
    ],
)
async def test_what_cannot_be_used_is_reported_with_its_flag(
    flag: str, value: str, why: str, workers: str
) -> None:
    said = await why_it_does_not_start("--workers", workers, flag, value)
    assert f"cannot start: {flag} {value}: {why}" in said
    assert "Traceback" not in said and "Unclosed" not in said


async def test_a_front_end_that_looks_for_its_scheduler_ends_at_ctrl_c() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_sbs.launch_router", "--host", "127.0.0.1", "--port", "0"),
        *("--sbs-scheduler", "ipc:///nobody", "--sbs-tenant-weights", "a=1"),
        stderr=asyncio.subprocess.PIPE,
        # Tests that run as a background job of a shell inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    async with asyncio.timeout(START_S):
        await process.stderr.readuntil(b"--sbs-tenant-header")  # it warns before it looks
        process.send_signal(signal.SIGINT)
        said = await process.stderr.read()
    assert await process.wait() == 130
    assert b"interrupted before it served" in said and b"Traceback" not in said


async def why_it_does_not_start(*flags: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sglang_sbs.launch_router", *WORKERS, "--host", "127.0.0.1"),
        *("--prometheus-host", "127.0.0.1", "--port", "0", "--prometheus-port", "0"),
        *("--sbs-endforward-bind", "none", *flags),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(START_S):
        _, said = await process.communicate()
    assert process.returncode == 1
    return said.decode()


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        (["--decode", "http://d"], "no prefill workers:"),
        (["--prefill", "http://p"], "no decode workers:"),
        ([], "no prefill and no decode workers:"),
        (["--service-discovery", "--prefill-selector", "a=b"], "no decode workers:"),
    ],
)
def test_the_role_without_workers_is_named(
    flags: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("kubernetes_asyncio")
    assert main(flags) == 2
    assert missing in capsys.readouterr().err


async def test_a_worker_that_is_not_there_is_reported_without_the_clients_words() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        async with aiohttp.ClientSession() as session:
            with pytest.raises(aiohttp.ClientConnectorError) as failed:
                await session.get(f"http://127.0.0.1:{port}/ready")
    assert "ssl:default" in str(failed.value), "aiohttp's own words"
    message = plain_error(failed.value)
    assert message == f"cannot connect to 127.0.0.1:{port}: {os.strerror(111)}"


async def test_log_alerts_and_workers_have_no_words_of_the_client(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with (
        cluster(prefill=1, decode=1, scheduler=Scheduler(SchedulerConfig())) as running_,
        aiohttp.ClientSession() as session,
    ):
        body = {"url": "http://127.0.0.1:1", "worker_type": "decode"}
        async with session.post(running_.url + "/workers", json=body) as answer:
            assert answer.status < 300
        (worker,) = [w for w in running_.server.registry if w.url == "http://127.0.0.1:1"]
        await until(lambda: bool(worker.problems))
        snapshot = running_.server.dispatcher.snapshot()
        problems = [(worker.url, text) for text in worker.problems.values()]
        alerts = find_alerts(snapshot, SchedulerConfig(), Recent(problems=problems))
    reported = " ".join([*worker.problems.values(), *(alert.text for alert in alerts), caplog.text])
    assert "cannot connect to 127.0.0.1:1: Connection refused" in reported
    assert "ssl:default" not in reported


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_first_signal_says_how_long_and_the_second_ends_it(workers: int) -> None:
    async with site() as engines:
        flags = (*engines.flags, "--port", "0", "--workers", str(workers))
        group = await start_group(*flags, "--shutdown-grace-period-secs", "77")
        try:
            await engines.ready(group)
            engines.decode[0].token_gate.close()
            stream = asyncio.create_task(engines.generate(group.url))
            await engines.decode[0].token_gate.arrived(1)
            group.process.send_signal(signal.SIGINT)
            await group.says(r"stopping: .* 77 s .*a second Ctrl-C or SIGTERM ends")
            if workers == 1:
                await group.says("stopping: 1 request in flight")
            group.process.send_signal(signal.SIGINT)
            async with asyncio.timeout(START_S):
                assert await group.process.wait() == 1
            engines.decode[0].token_gate.open()
            await asyncio.gather(stream, return_exceptions=True)
        finally:
            await group.end()


def test_counted_uses_the_singular_for_one() -> None:
    assert [counted(n, "request") for n in (0, 1, 2, 1234)] == [
        *("0 requests", "1 request", "2 requests", "1,234 requests")
    ]
