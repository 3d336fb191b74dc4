"""EndForward with a shared secret: the engine's real publisher against the router's listener."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from router_harness import cluster, until

from sglang_sbs.engine.config import ConfigError, load_config
from sglang_sbs.engine.hooks import open_publisher
from sglang_sbs.engine.publish import Publisher
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.signals.endforward_socket import _MAX_MESSAGE_BYTES
from sglang_sbs.scheduling.events import ForwardEnded
from sglang_sbs.wire import TOPIC, encode_endforward
from sglang_sbs.wire.curve import keys_of
from tools.stand_ins.mock_engine import MockEngine
from tools.stand_ins.ports import free_ports

SECRET, OTHER = "s" * 40, "o" * 40


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(SECRET + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def publishing(*args: Any, **kwargs: Any) -> Iterator[Publisher]:
    publisher = Publisher(*args, **kwargs)
    try:
        yield publisher
    finally:
        publisher.close()


def say(publisher: Publisher, engine: MockEngine, **fields: Any) -> None:
    publisher.send(encode_endforward(engine.report(**fields)))


async def test_only_reports_with_the_secret_are_received(key_file: Path) -> None:
    flag = ("--sbs-endforward-key-file", str(key_file))
    async with cluster(*flag, prefill_dp=1, decode_dp=1, sbs_block=True) as c:
        endpoint = str(c.server.endforward_endpoint)
        plain = publishing([endpoint], None)
        wrong = publishing([endpoint], None, keys=keys_of(OTHER))
        environ = {"SGLANG_SBS_ROUTERS": endpoint, "SGLANG_SBS_ENDFORWARD_KEY_FILE": str(key_file)}
        right = open_publisher(load_config(environ), 0)
        with plain as in_clear, wrong as stranger:
            for _ in range(400):
                say(in_clear, c.decode[0])
                say(stranger, c.decode[0])
                right.send(encode_endforward(c.prefill[0].report()))
                await asyncio.sleep(0.005)
                if len(c.scheduler.of(ForwardEnded)) >= 50:
                    break
        right.close()
        received = {event.instance for event in c.scheduler.of(ForwardEnded)}
        assert received == {c.prefill[0].url}
        assert len(c.scheduler.of(ForwardEnded)) >= 50


async def test_an_engine_that_binds_shows_itself_only_to_who_has_the_secret(
    key_file: Path,
) -> None:
    bind = f"tcp://127.0.0.1:{free_ports(1)[0]}"
    engine = MockEngine("prefill", dp_size=1)
    engine._server_info = {"sbs": {"boot_id": engine.boot_id, "bind": bind}}
    await engine.start()
    context = zmq.Context()
    spy = context.socket(zmq.SUB)
    spy.setsockopt(zmq.LINGER, 0)
    spy.setsockopt(zmq.SUBSCRIBE, b"")
    spy.connect(bind)
    try:
        with publishing([], bind, keys=keys_of(SECRET)) as publisher:
            async with cluster("--sbs-endforward-key-file", str(key_file)) as c:
                body = {"url": engine.url, "worker_type": "prefill"}
                async with c.post("/workers", body) as answer:
                    assert answer.status == 202
                await until(lambda: c.server.registry.get(engine.url).usable)  # type: ignore[union-attr]

                def received() -> bool:
                    say(publisher, engine)
                    return len(c.scheduler.of(ForwardEnded)) >= 5

                await until(received)
            with pytest.raises(zmq.Again):
                spy.recv(zmq.NOBLOCK)
    finally:
        spy.close(0)
        context.term()
        await engine.stop()


async def test_messages_that_are_too_large_are_not_read_and_the_next_ones_are() -> None:
    async with cluster(prefill_dp=1, sbs_block=True) as c:
        with publishing([str(c.server.endforward_endpoint)], None) as publisher:

            def received() -> bool:
                say(publisher, c.prefill[0])
                return bool(c.scheduler.of(ForwardEnded))

            await until(received)
            publisher.send([TOPIC, b"\0" * 8, b"x" * (_MAX_MESSAGE_BYTES + 1)])
            count = len(c.scheduler.of(ForwardEnded))

            def received_again() -> bool:
                say(publisher, c.prefill[0])
                return len(c.scheduler.of(ForwardEnded)) > count + 20

            await until(received_again)
            async with c.get("/readiness") as response:
                assert response.status == 200


def test_bad_secrets_are_refused_on_both_sides(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("abc")
    for path in (short, tmp_path / "none"):
        with pytest.raises(FlagError, match="--sbs-endforward-key-file"):
            parse_flags(["--sbs-endforward-key-file", str(path)])
        environ = {"SGLANG_SBS_ROUTERS": "tcp://r:1", "SGLANG_SBS_ENDFORWARD_KEY_FILE": str(path)}
        with pytest.raises(ConfigError, match="SGLANG_SBS_ENDFORWARD_KEY_FILE"):
            load_config(environ)


def test_a_secret_is_for_one_direction_and_is_not_shown(key_file: Path) -> None:
    environ = {
        "SGLANG_SBS_ROUTERS": "tcp://r:1",
        "SGLANG_SBS_ENDFORWARD_KEY_FILE": str(key_file),
    }
    assert SECRET not in repr(load_config(environ))
    with pytest.raises(ConfigError, match="not both"):
        load_config(environ | {"SGLANG_SBS_BIND": "tcp://*:7600"})


def test_with_a_secret_an_open_port_needs_no_warning(key_file: Path) -> None:
    options = parse_flags(["--sbs-endforward-key-file", str(key_file)])
    assert options.endforward_keys == keys_of(SECRET)
    assert options.warnings == ()
    assert keys_of(SECRET) != keys_of(OTHER)
