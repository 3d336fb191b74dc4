"""Flags of several processes, and how limits and sockets are shared out."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from router_harness import until

from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.supervision.socket_handover import (
    check_free,
    control_path,
    listen,
)
from sglang_sbs.router.supervision.supervisor import Child, ChildTimes, Supervisor

TWO = ["--sbs-scheduler", "tcp://127.0.0.1:1,tcp://127.0.0.1:2"]
ALL = ["--sbs-listen", "tcp://0.0.0.0:7700"]
WORKERS = ["--prefill", "http://p0:1", "8998", "--decode", "http://d0:1"]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--sbs-scheduler", "tcp://10.0.0.1:7700"], "--sbs-scheduler-key-file"),
        (["--sbs-scheduler", "tcp://127.0.0.1:1,tcp://127.0.0.1:1"], "twice"),
        (["--sbs-scheduler", "tcp://127.0.0.1:1,127.0.0.1:2"], "write tcp://HOST:PORT"),
        (["--sbs-listen", "tcp://127.0.0.1:7700"], "is for schedulers: sglang-sbs scheduler"),
        (["--sbs-election", "k8s://a/b"], "is for schedulers: sglang-sbs scheduler"),
        (["--sbs-role", "scheduler"], "needs --sbs-listen"),
        (
            ["--sbs-role", "scheduler", "--sbs-scheduler", "tcp://127.0.0.1:1,tcp://127.0.0.1:2"],
            "select this one with",
        ),
        (
            [*("--sbs-role", "scheduler", "--sbs-scheduler-key-file", "none"), *TWO, *ALL],
            "--sbs-advertise tcp://HOST:PORT",
        ),
        (
            ["--sbs-role", "scheduler", *TWO, "--sbs-listen", "tcp://127.0.0.1:3"],
            "this scheduler (tcp://127.0.0.1:3) is not in the list",
        ),
        (["--sbs-role", "front-end"], "needs --sbs-scheduler tcp://HOST:PORT"),
        (["--sbs-role", "scheduler", "--sbs-scheduler", "10.0.0.1:7700"], "write tcp://HOST:PORT"),
        (
            ["--sbs-role", "scheduler", "--sbs-scheduler", "tcp://0.0.0.0:7700"],
            "--sbs-scheduler-key-file",
        ),
        (["--sbs-role", "front-end", "--sbs-scheduler", "tcp://far:7700"], "openssl rand"),
        (
            [*("--sbs-role", "scheduler", "--sbs-scheduler", "ipc:///x"), "--workers", "2"],
            "--frontends is for front ends",
        ),
        (["--workers", "0"], "whole number >= 1"),
    ],
)
def test_what_does_not_go_together_is_refused_with_a_way_out(flags: list[str], says: str) -> None:
    with pytest.raises(FlagError, match=re.escape(says)):
        parse_flags([*WORKERS, *flags])


def test_one_process_unless_asked_and_both_spellings() -> None:
    assert parse_flags(WORKERS).workers == 1
    assert parse_flags([*WORKERS, "--workers", "3"]).workers == 3
    assert parse_flags([*WORKERS, "--router-workers", "3"]).workers == 3


def test_a_loopback_scheduler_needs_no_secret_and_an_open_key_file_is_warned_about(
    tmp_path: Path,
) -> None:
    local = ["--sbs-role", "front-end", "--sbs-scheduler", "tcp://127.0.0.1:7700"]
    assert parse_flags(local).several.keys is None
    path = tmp_path / "secret"
    path.write_text("x" * 40)
    path.chmod(0o600)
    options = parse_flags([*local, "--sbs-scheduler-key-file", str(path)])
    assert options.several.keys is not None
    assert not any("chmod" in warning for warning in options.warnings)
    assert "x" * 40 not in repr(options)
    assert options.several.keys.client_secret.decode() not in repr(options)
    path.chmod(0o644)
    assert any(
        "chmod 600" in warning
        for warning in parse_flags([*local, "--sbs-scheduler-key-file", str(path)]).warnings
    )


def test_limits_of_the_router_are_shared_out_among_its_front_ends() -> None:
    flags = ["--workers", "3", "--max-concurrent-requests", "10", "--queue-size", "2"]
    flags += ["--rate-limit-tokens-per-second", "7"]
    supervisor = Supervisor([*WORKERS, *flags], parse_flags([*WORKERS, *flags]))
    children = [
        parse_flags(supervisor._front_end_command("ipc:///x", number)) for number in range(3)
    ]
    assert [child.max_concurrent_requests for child in children] == [4, 3, 3]
    assert [child.queue_size for child in children] == [1, 1, 0]
    assert sum(child.rate_limit_per_s for child in children) == pytest.approx(7)
    assert len({child.rate_limit_per_s for child in children}) == 1
    assert {(child.role, child.workers) for child in children} == {("front-end", 1)}
    scheduler = parse_flags(supervisor._scheduler_command("ipc:///x"))
    assert (scheduler.role, scheduler.workers) == ("scheduler", 1)
    assert scheduler.prefill == parse_flags(WORKERS).prefill


def test_a_limit_that_is_less_than_the_front_ends_is_refused() -> None:
    with pytest.raises(FlagError, match="write at least 3"):
        parse_flags([*WORKERS, "--workers", "3", "--max-concurrent-requests", "2"])


def test_a_restarted_scheduler_keeps_the_event_log_of_the_one_before() -> None:
    flags = [*WORKERS, "--workers", "2", "--sbs-event-log", "/var/log/events"]
    supervisor = Supervisor(flags, parse_flags(flags))
    logs = [parse_flags(supervisor._scheduler_command("ipc:///x")).event_log for _ in range(3)]
    assert [str(log) for log in logs] == [
        "/var/log/events",
        "/var/log/events.1",
        "/var/log/events.2",
    ]


async def test_a_child_that_hangs_is_killed_and_restarted(tmp_path: Path) -> None:
    command = [
        *(*WORKERS, "--sbs-role", "scheduler", "--sbs-scheduler", f"ipc://{tmp_path}/s"),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
        *("--sbs-endforward-bind", "none"),
    ]
    times = ChildTimes(ping_every_s=0.05, hung_s=0.5)
    child = Child("scheduler", lambda: command, [], times=times)
    keeping = asyncio.create_task(child.keep())
    try:
        async with asyncio.timeout(60):
            await child.serving.wait()
            first = child.pid
            await asyncio.sleep(1.0)
            assert child.pid == first, "one that moves is left alone"
            os.kill(first, signal.SIGSTOP)
            await until(lambda: child.pid != first)
            await child.serving.wait()
    finally:
        child.end()
        await keeping


def test_listening_sockets_share_a_port_that_counts_as_taken() -> None:
    first = listen("127.0.0.1", 0)
    port = first[0].getsockname()[1]
    second = listen("127.0.0.1", port)
    try:
        with pytest.raises(OSError, match="--sbs-take-over"):
            check_free("127.0.0.1", port)
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
    finally:
        for sock in first + second:
            sock.close()
    check_free("127.0.0.1", port)


def test_the_control_socket_lies_in_a_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    path = control_path("127.0.0.1", 30000)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.stat().st_uid == os.geteuid()
    path.parent.chmod(0o777)
    with pytest.raises(OSError, match="0700"):
        control_path("127.0.0.1", 30000)
