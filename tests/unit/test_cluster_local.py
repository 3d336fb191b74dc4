"""`LocalCluster` on small HTTP servers in place of SGLang: order, readiness, failures, stopping."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

import pytest

from benchmarks.breakable import BreakableCluster
from benchmarks.demo import kept_cluster
from sglang_sbs.cluster.local import ClusterStartError, Progress
from sglang_sbs.cluster.plan import ClusterPlan, InstancePlan, Role, ServerPlan
from sglang_sbs.cluster.ports import free_port_blocks
from sglang_sbs.cluster.supervise import ProcessDiedError

# Answers 404 to anything but {path}, which is 503 the first {not_yet} times.
SERVER = """
import http.server
left = {not_yet}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        global left
        status = 404
        if self.path == {path!r}:
            status = 503 if left > 0 else 200
            left -= 1
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", {port}), Handler).serve_forever()
"""
NEVER_READY = 10**9


def instance(
    tmp_path: Path, name: str, path: str = "/ready", not_yet: int = 0, program: str | None = None
) -> InstancePlan:
    port = next(_ports)
    source = program or SERVER.format(path=path, not_yet=not_yet, port=port)
    return InstancePlan(
        name=name,
        argv=(sys.executable, "-c", source),
        environment=dict(os.environ),
        log_path=tmp_path / f"{name}.log",
        url=f"http://127.0.0.1:{port}",
        role=Role.UNIFIED,
        bootstrap_port=None,
        ranks=1,
    )


_ports = free_port_blocks(1)


def router(tmp_path: Path, not_yet: int = 0) -> ServerPlan:
    port = next(_ports)
    return ServerPlan(
        name="router",
        argv=(
            sys.executable,
            "-c",
            SERVER.format(path="/readiness", not_yet=not_yet, port=port),
        ),
        environment=dict(os.environ),
        log_path=tmp_path / "router.log",
        url=f"http://127.0.0.1:{port}",
    )


def cluster_plan(
    tmp_path: Path, *instances: InstancePlan, front: ServerPlan | None = None
) -> ClusterPlan:
    return ClusterPlan(
        instances=instances,
        router=front,
        cpu=None,
        environment={},
        log_dir=tmp_path,
    )


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def command_line(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]


async def test_the_router_starts_once_every_engine_is_ready(tmp_path: Path) -> None:
    steps: list[Progress] = []
    plan = cluster_plan(
        tmp_path,
        instance(tmp_path, "a"),
        instance(tmp_path, "b", not_yet=3),
        front=router(tmp_path, not_yet=2),
    )
    async with BreakableCluster(plan, 60, steps.append) as cluster:
        pids = [cluster.pid(name) for name in ("a", "b", "router")]
        with pytest.raises(KeyError):
            cluster.pid("c")
    names = [(step.name, step.state) for step in steps]
    assert names.index(("router", "starting")) > names.index(("a", "ready"))
    assert names.index(("router", "starting")) > names.index(("b", "ready"))
    assert ("router", "ready") in names
    assert not any(is_alive(pid) for pid in pids)


async def test_an_engine_without_the_newest_readiness_path_is_asked_otherwise(
    tmp_path: Path,
) -> None:
    async with BreakableCluster(cluster_plan(tmp_path, instance(tmp_path, "a", "/model_info")), 60):
        pass


async def test_an_engine_that_dies_at_start_is_reported_at_once(tmp_path: Path) -> None:
    plan = cluster_plan(
        tmp_path,
        instance(tmp_path, "slow", not_yet=NEVER_READY),
        instance(tmp_path, "broken", program="raise RuntimeError('no such model')"),
    )
    cluster = BreakableCluster(plan, 60)
    with pytest.raises(ClusterStartError) as raised:
        await cluster.__aenter__()
    assert "broken ended by itself (exit code 1)" in str(raised.value)
    assert "no such model" in str(raised.value)
    with pytest.raises(KeyError):
        cluster.pid("slow")


async def test_a_start_that_takes_too_long_names_engine_answer_and_flag(tmp_path: Path) -> None:
    plan = cluster_plan(tmp_path, instance(tmp_path, "slow", not_yet=NEVER_READY))
    with pytest.raises(ClusterStartError, match=r"slow: .*GET /ready answered 503") as raised:
        await BreakableCluster(plan, startup_timeout_s=1).__aenter__()
    assert "--startup-timeout" in str(raised.value)


async def test_a_death_while_running_is_reported(tmp_path: Path) -> None:
    plan = cluster_plan(tmp_path, instance(tmp_path, "a"), instance(tmp_path, "b"))
    async with BreakableCluster(plan, 60) as cluster:
        os.kill(cluster.pid("b"), signal.SIGKILL)
        async with asyncio.timeout(30):
            with pytest.raises(ProcessDiedError) as raised:
                await cluster.unless_one_dies(asyncio.Event().wait())
    death = raised.value
    assert (death.name, death.returncode) == ("b", -signal.SIGKILL)


async def test_a_cancelled_start_leaves_nothing_running(tmp_path: Path) -> None:
    started: asyncio.Queue[Progress] = asyncio.Queue()
    plan = cluster_plan(tmp_path, instance(tmp_path, "slow", not_yet=NEVER_READY))
    cluster = BreakableCluster(plan, 60, started.put_nowait)
    entering = asyncio.create_task(cluster.__aenter__())
    await started.get()
    pid = cluster.pid("slow")
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    assert not is_alive(pid)


async def test_an_instance_is_killed_and_started_again_with_more_flags(tmp_path: Path) -> None:
    steps: list[Progress] = []
    plan = cluster_plan(tmp_path, instance(tmp_path, "a"), instance(tmp_path, "b", not_yet=2))
    async with BreakableCluster(plan, 60, steps.append) as cluster:
        first, other = cluster.pid("b"), cluster.pid("a")
        await cluster.kill("b")
        assert not is_alive(first)
        steps.clear()
        await cluster.start_instance("b", ["--more", "1"])
        second = cluster.pid("b")
        assert second != first
        assert cluster.pid("a") == other
        assert [(step.name, step.state) for step in steps] == [("b", "starting"), ("b", "ready")]
        assert command_line(second)[-2:] == ["--more", "1"]
    assert not is_alive(second)


async def test_an_instance_that_ends_while_it_starts_again_is_an_error(tmp_path: Path) -> None:
    flag_fails = "import sys\nif '--bad' in sys.argv: sys.exit('no such flag')\n"
    plan = instance(tmp_path, "a")
    source = flag_fails + plan.argv[2]
    plan = dataclasses.replace(plan, argv=(*plan.argv[:2], source))
    async with BreakableCluster(cluster_plan(tmp_path, plan), 60) as cluster:
        await cluster.kill("a")
        with pytest.raises(ClusterStartError, match=r"(?s)a ended by itself.*no such flag"):
            await cluster.start_instance("a", ["--bad"])


async def test_an_instance_over_two_nodes_starts_dies_and_starts_again_as_one(
    tmp_path: Path,
) -> None:
    node = instance(tmp_path, "a-node-1", program="import time; time.sleep(1000)")
    plan = cluster_plan(tmp_path, dataclasses.replace(instance(tmp_path, "a"), followers=(node,)))
    async with BreakableCluster(plan, 60) as cluster:
        first = cluster.pid("a-node-1")
        await cluster.kill("a")
        assert not is_alive(first)
        await cluster.start_instance("a")
        second = cluster.pid("a-node-1")
        assert is_alive(second)
        assert second != first
    assert not is_alive(second)


async def test_the_kept_demo_outlives_its_engines_and_starts_them_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plan = cluster_plan(tmp_path, instance(tmp_path, "a"), instance(tmp_path, "b"))
    plan = dataclasses.replace(plan, router=router(tmp_path))
    said = ""

    async def until_said(text: str) -> None:
        nonlocal said
        async with asyncio.timeout(60):
            while text not in said:
                await asyncio.sleep(0.01)
                said += capfd.readouterr().out

    async with kept_cluster.EnduringCluster(plan, 60) as cluster:
        cluster.revive_s = 0.01
        serving = asyncio.create_task(cluster.serve(asyncio.sleep(1000)))
        pids = {name: cluster.pid(name) for name in ("a", "b")}
        os.kill(pids["a"], signal.SIGKILL)
        os.kill(pids["b"], signal.SIGKILL)
        for name, pid in pids.items():
            await until_said(f"{name} ended (killed by SIGKILL)")
            await until_said(f"{name} is back as process")
            assert cluster.pid(name) != pid
        os.kill(cluster.pid("router"), signal.SIGKILL)
        async with asyncio.timeout(60):
            with pytest.raises(ProcessDiedError, match="router ended"):
                await serving
