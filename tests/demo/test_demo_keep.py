"""`sglang-sbs demo --keep` before anything is started, and the load it keeps up."""

from __future__ import annotations

import asyncio
import math
import re
import socket
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.demo import cli
from benchmarks.demo.kept_cluster import MOST_IN_FLIGHT, Traffic, steady_load, to_try
from benchmarks.demo.load import Sample


def test_a_taken_port_is_named_with_the_flag_that_changes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code = cli.main(["--keep", "--prometheus-port", str(port), "--out", str(tmp_path)])
    assert code == 1
    said = " ".join(capsys.readouterr().out.split())
    assert f"port {port} is in use" in said
    assert "choose another with --p" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--keep", "--requests", "10"], "--requests: --keep compares nothing"),
        (["--keep", "--json", "a.json"], "--json: --keep compares nothing"),
        (["--port", "3000"], "--port: only --keep serves at a fixed port"),
        (["--keep", "--port", "0"], "--port must be a number in 1..65535"),
        (["--keep", "--port", "3000", "--prometheus-port", "3000"], "must differ"),
        (["--tp", "3"], "--tp 3: with --dp 2 it must be 2, 4 or 8"),
        (["--tp", "4", "--dp", "3"], "--tp 4: with --dp 3 it must be 3, 6 or 12"),
        (["--dwdp", "--tp", "4"], "--dwdp needs --dp of at least 2, and --tp as large"),
        (["--dwdp", "--dp", "1"], "--dwdp needs --dp of at least 2"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert re.search(complaint, capsys.readouterr().err)


async def test_the_load_stops_sending_while_too_much_is_in_flight() -> None:
    held = asyncio.Event()
    arrived = 0

    async def hold(_request: web.Request) -> web.Response:
        nonlocal arrived
        arrived += 1
        await held.wait()
        return web.Response(status=503, text="gone")

    app = web.Application()
    app.router.add_post("/generate", hold)
    async with TestServer(app) as server:
        traffic = Traffic()
        url = str(server.make_url("")).rstrip("/")
        load = asyncio.create_task(steady_load(url, 10_000.0, 1, traffic))
        async with asyncio.timeout(30):
            while not traffic.skipped or arrived < MOST_IN_FLIGHT:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (traffic.in_flight, arrived) == (MOST_IN_FLIGHT, MOST_IN_FLIGHT)
        held.set()
        async with asyncio.timeout(30):
            while traffic.failed < MOST_IN_FLIGHT:  # noqa: ASYNC110 (nothing announces it)
                await asyncio.sleep(0.01)
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    assert traffic.in_flight == 0
    assert "HTTP 503" in traffic.describe()


def test_the_status_line_tells_answers_failures_and_recent_ttft() -> None:
    traffic = Traffic()
    assert traffic.describe() == "0 answered, 0 failed, 0 in flight"
    traffic.add(Sample(0.0, 10, ttft_s=0.25, e2e_s=0.5))
    traffic.add(Sample(0.0, 10, ttft_s=math.nan, error="HTTP 503: full"))
    assert traffic.describe() == (
        "1 answered, 1 failed, 0 in flight; last 30 s: TTFT mean 250 ms, p99 250 ms; "
        "last error: HTTP 503: full"
    )


def test_what_to_try_names_the_process_and_the_router() -> None:
    said = to_try("http://127.0.0.1:3000", "prefill-2", 4711)
    assert "kill -9 4711" in said
    for step in ("policy round_robin --router", "why ID --router", "/well"):
        assert step in said
    assert said.count("http://127.0.0.1:3000") == 3


def test_a_kept_cluster_starts_at_a_load_where_requests_wait() -> None:
    assert cli.KEPT_LOAD >= 0.6
