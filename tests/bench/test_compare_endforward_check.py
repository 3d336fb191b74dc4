"""`scripts/compare-routers` measures nothing while messages of engines are missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from aiohttp import web
from msgspec.structs import replace

from benchmarks.compare_routers.command import build_parser
from benchmarks.compare_routers.contenders import BY_NAME
from benchmarks.compare_routers.plan import Plan
from benchmarks.compare_routers.prompts import id_prompts
from benchmarks.compare_routers.results.rows import Key, RowFile
from benchmarks.compare_routers.runs import cell, endforward_check
from benchmarks.compare_routers.runs.engines import Engines
from benchmarks.demo.runs import RouterPorts
from benchmarks.listener import ReceivedMessage, ReportListener
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.wire import EndForward, encode_endforward
from sglang_sbs.wire.curve import keys_in

NAMES = {"one": "p0", "two": "p1", "three": "d0"}
KEY = Key("paper", 0.8, 1, "sbs")


def message_of(boot_id: str, rank: int) -> ReceivedMessage:
    role = "decode" if NAMES[boot_id].startswith("d") else "prefill"
    return ReceivedMessage(
        0.0,
        EndForward(
            instance_id="",
            boot_id=boot_id,
            role=role,
            dp_rank=rank,
            dp_size=2,
            seq=1,
            kind="heartbeat",
            forward_id=0,
        ),
    )


def test_silent_are_instances_and_ranks_without_a_message() -> None:
    messages = [message_of("one", 0), message_of("one", 1), message_of("three", 1)]
    assert endforward_check.silent(messages, NAMES) == ["d0/0", "p1"]
    assert endforward_check.silent_prefill(messages, NAMES) == ["p1"]
    assert endforward_check.silent([], NAMES) == ["d0", "p0", "p1"]


def test_other_nodes_of_an_engine_are_known_by_its_url() -> None:
    urls = {"p0": "http://P0:30000/", "p1": "http://127.0.0.1:30001"}
    messages = [
        ReceivedMessage(0.0, replace(message_of("one", 1).report, boot_id=boot, instance_id=url))
        for boot, url in (
            ("node 2", "http://p0:30000"),
            ("local", "http://localhost:30001"),
            ("stranger", "http://p9:30000"),
            ("no url", "a b"),
            ("nothing", ""),
        )
    ]
    names = endforward_check.names_of(messages, {"one": "p0"}, urls)
    assert names == {"one": "p0", "node 2": "p0", "local": "p1"}
    assert endforward_check.silent([message_of("one", 0), *messages], names) == ["p1/0"]


def engines_with(messages: list[ReceivedMessage], ports: RouterPorts) -> Engines:
    taken = [list(messages)]
    listener = SimpleNamespace(bind="tcp://0.0.0.0:7601", take=lambda: taken.pop() if taken else [])
    prefill = [("http://p0:30000", 8998), ("http://p1:30000/", 8998)]
    return Engines(prefill, ["http://d0"], NAMES, 2, 1024, 1e4, ports, listener)  # type: ignore[arg-type]


async def test_a_run_is_not_measured_while_messages_of_a_prefill_rank_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = []

    @asynccontextmanager
    async def running(*_: object) -> AsyncIterator[tuple[str, object]]:
        yield "http://router", SimpleNamespace(cpu_s=lambda: 0.0)

    async def load(_url: str, sent: list[object], **_: object) -> list[object]:
        measured.extend(sent[cell.WARM_UP_REQUESTS :])
        return []

    monkeypatch.setattr(cell, "_running", running)
    monkeypatch.setattr(cell, "run_load", load)
    setting = cell.Setting(id_prompts(), None, 1.0, 0.1, 60.0, tmp_path, "", reports_wait_s=0.0)
    messages = [message_of("one", 0), message_of("one", 1), message_of("two", 0)]
    with pytest.raises(
        endforward_check.MissingReportsError, match="no EndForward of p1/1 comes to tcp:"
    ):
        await cell.run_cell(
            BY_NAME["mini_lb"], KEY, 50, engines_with(messages, RouterPorts(1, 2, 3)), setting
        )
    assert not measured


async def test_a_router_that_does_not_hear_what_we_hear_is_named() -> None:
    async def page(_request: web.Request) -> web.Response:
        lines = [
            'sbs_endforward_messages_total{dp_rank="0",worker="http://p0:30000"} 4.0',
            'sbs_endforward_messages_total{dp_rank="1",worker="http://p1:30000"} 4.0',
        ]
        return web.Response(text="# TYPE sbs_endforward_messages counter\n" + "\n".join(lines))

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = int(runner.addresses[0][1])
    messages = [message_of(boot, rank) for boot in ("one", "two") for rank in (0, 1)]
    try:
        with pytest.raises(
            endforward_check.MissingReportsError,
            match=r"router sbs receives nothing from p0/1, p1/0: .* port 7600",
        ):
            await cell._check_reports(
                BY_NAME["sbs"], engines_with(messages, RouterPorts(1, 7600, port)), 0.0
            )
        # A router of another project has no use for them.
        smg = engines_with(messages, RouterPorts(1, 7600, 1))
        await cell._check_reports(BY_NAME["smg"], smg, 0.0)
    finally:
        await runner.cleanup()


async def test_the_listener_hears_engines_that_have_the_key(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("0123456789" * 4)
    bind = f"tcp://127.0.0.1:{next(free_port_blocks(1))}"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine = context.socket(zmq.PUB)
    try:
        keys_in(key_file).connect(engine)
        engine.setsockopt(zmq.LINGER, 0)
        engine.connect(bind)
        async with ReportListener(bind, key_file) as listener, asyncio.timeout(20):
            while not listener.take():
                engine.send_multipart(encode_endforward(message_of("one", 0).report))
                await asyncio.sleep(0.02)
    finally:
        engine.close(0)
        context.term()


REAL = ["--real", "--prefill", "http://p0:30000", "8998", "--decode", "http://d0:30000"]
REAL += ["--slo-ttft", "0.8", "--prompts", "ids", "--capacity", "150000"]


def test_routers_of_ours_hear_engines_on_other_hosts_and_with_a_key(tmp_path: Path) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("0123456789" * 4)
    words = [*REAL, "--key-file", str(key_file), "--report", str(tmp_path)]
    plan = Plan(build_parser().parse_args(words))
    work = plan.campaign(RowFile(tmp_path / "rows.jsonl"), [], None)  # type: ignore[arg-type]
    flags = " ".join(cell._own_flags(KEY, 7600, work.setting))
    assert "--sbs-endforward-bind tcp://0.0.0.0:7600" in flags
    assert f"--sbs-endforward-key-file {key_file}" in flags
    virtual = cell.Setting(id_prompts(), None, 1.0, 0.1, 60.0, tmp_path, "")
    assert cell._own_flags(KEY, 7600, virtual) == ["--sbs-endforward-bind", "tcp://127.0.0.1:7600"]
