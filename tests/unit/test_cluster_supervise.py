"""Processes are started with their logs, watched, and stopped: these and no others."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from harness.until import until

from benchmarks.breakable import BreakableProcesses
from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.cluster.spawn import SpawnedProcess, SpawnError, last_log_lines
from sglang_sbs.cluster.supervise import ClusterSupervisor, ProcessDiedError, describe_exit

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
IGNORES_SIGTERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "print('up', flush=True); time.sleep(600)"
)
# A child in the same process group, which nobody reports to the supervisor.
LEAVES_A_CHILD = (
    "import os, signal, subprocess, sys, time; "
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    "print('up', child.pid, flush=True); time.sleep(600)"
)


def plan(tmp_path: Path, name: str, program: str, **environment: str) -> ProcessPlan:
    return ProcessPlan(
        name=name,
        argv=(sys.executable, "-c", program),
        environment={**os.environ, **environment},
        log_path=tmp_path / f"{name}.log",
    )


async def start(supervisor: ClusterSupervisor, process: ProcessPlan) -> SpawnedProcess:
    """Start and wait for the program's first line."""
    started = await supervisor.start(process)
    await until(lambda: "up" in process.log_path.read_text())
    return started


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_output_and_environment_reach_the_process(tmp_path: Path) -> None:
    program = "import os, sys; print(os.environ['X']); print('err', file=sys.stderr)"
    supervisor = ClusterSupervisor()
    process = await supervisor.start(plan(tmp_path, "a", program, X="value"))
    assert await process.exited == 0
    assert set((tmp_path / "a.log").read_text().split()) == {"value", "err"}


async def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    missing = ProcessPlan("a", ("/nonexistent/python",), {}, tmp_path / "a.log")
    with pytest.raises(SpawnError, match=r"cannot start a .*/nonexistent/python"):
        await ClusterSupervisor().start(missing)


async def test_stop_ends_what_was_started_and_nothing_else(tmp_path: Path) -> None:
    ours, theirs = ClusterSupervisor(), ClusterSupervisor()
    stopped = [await start(ours, plan(tmp_path, name, SLEEP)) for name in ("a", "b")]
    other = await start(theirs, plan(tmp_path, "c", SLEEP))
    assert await ours.stop(grace_s=30) == []
    assert [process.exited.result() for process in stopped] == [-signal.SIGTERM] * 2
    assert is_alive(other.pid)
    assert not ours.processes
    await theirs.stop(grace_s=30)
    assert not is_alive(other.pid)


async def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    supervisor = ClusterSupervisor()
    process = await start(supervisor, plan(tmp_path, "stubborn", IGNORES_SIGTERM))
    assert await supervisor.stop(grace_s=0.2) == ["stubborn"]
    assert process.exited.result() == -signal.SIGKILL


async def test_children_that_outlive_their_parent_are_killed(tmp_path: Path) -> None:
    supervisor = ClusterSupervisor()
    parent = await start(supervisor, plan(tmp_path, "parent", LEAVES_A_CHILD))
    child = int(parent.log_path.read_text().split()[1])
    os.kill(parent.pid, signal.SIGKILL)
    await parent.exited
    assert is_alive(child)
    await supervisor.stop(grace_s=30)
    await until(lambda: not is_alive(child))


async def test_a_death_is_reported_with_exit_code_and_last_words(tmp_path: Path) -> None:
    supervisor = ClusterSupervisor()
    await start(supervisor, plan(tmp_path, "healthy", SLEEP))
    await supervisor.start(plan(tmp_path, "sick", "print('my last words'); raise SystemExit(3)"))
    async with asyncio.timeout(30):
        with pytest.raises(ProcessDiedError) as raised:
            await supervisor.unless_one_dies(asyncio.Event().wait())
    await supervisor.stop(grace_s=30)
    death = raised.value
    assert (death.name, death.returncode) == ("sick", 3)
    assert "sick ended by itself (exit code 3)" in str(death)
    assert "my last words" in str(death)


async def test_a_watched_process_is_reported_but_not_stopped(tmp_path: Path) -> None:
    owner, watcher = ClusterSupervisor(), ClusterSupervisor()
    process = await start(owner, plan(tmp_path, "theirs", SLEEP))
    watcher.watch(process)
    await watcher.stop(grace_s=30)
    assert is_alive(process.pid)
    await owner.stop(grace_s=30)
    with pytest.raises(ProcessDiedError, match=r"^theirs ended"):
        await watcher.unless_one_dies(asyncio.Event().wait())


async def test_nothing_is_left_when_the_supervising_process_is_killed(tmp_path: Path) -> None:
    program = f"""
import asyncio, os, sys
from pathlib import Path
from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.cluster.spawn import spawn_child

async def main():
    log_path = Path({str(tmp_path / "child.log")!r})
    plan = ProcessPlan("child", (sys.executable, "-c", {SLEEP!r}), dict(os.environ), log_path)
    child = await spawn_child(plan)
    print("up", child.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
    supervisor = ClusterSupervisor()
    parent = await start(supervisor, plan(tmp_path, "parent", program))
    child = int(parent.log_path.read_text().split()[1])
    assert is_alive(child)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.exited
    await until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("returncode", "words"),
    [
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_exit_codes_are_put_in_words(returncode: int, words: str) -> None:
    assert describe_exit(returncode) == words


def test_only_the_end_of_a_log_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {number}" for number in range(10000)))
    assert last_log_lines(log, 2) == "  line 9998\n  line 9999"
    assert last_log_lines(tmp_path / "missing") == "  (empty)"


async def test_a_killed_process_is_gone_with_its_children_and_may_be_started_again(
    tmp_path: Path,
) -> None:
    supervisor = BreakableProcesses()
    parent = await start(supervisor, plan(tmp_path, "a", LEAVES_A_CHILD))
    other = await start(supervisor, plan(tmp_path, "b", SLEEP))
    child = int((tmp_path / "a.log").read_text().split()[1])
    await supervisor.kill("a")
    assert parent.exited.result() == -signal.SIGKILL
    await until(lambda: not is_alive(child))
    assert is_alive(other.pid)
    with pytest.raises(KeyError):
        await supervisor.kill("a")
    (tmp_path / "a.log").unlink()
    again = await start(supervisor, plan(tmp_path, "a", SLEEP))
    assert supervisor.processes == (other, again)
    await supervisor.stop(10)


async def test_a_signal_reaches_the_children_too(tmp_path: Path) -> None:
    supervisor = BreakableProcesses()
    parent = await start(supervisor, plan(tmp_path, "a", LEAVES_A_CHILD))
    child = int((tmp_path / "a.log").read_text().split()[1])

    def states() -> set[str]:
        stats = (Path(f"/proc/{pid}/stat").read_text() for pid in (parent.pid, child))
        return {text.rpartition(")")[2].split()[0] for text in stats}

    supervisor.signal("a", signal.SIGSTOP)
    await until(lambda: states() == {"T"})
    supervisor.signal("a", signal.SIGCONT)
    await until(lambda: "T" not in states())
    with pytest.raises(KeyError):
        supervisor.signal("b", signal.SIGCONT)
    await supervisor.stop(10)
