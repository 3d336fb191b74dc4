"""One run: a contender's router in front of the engines, a load, its row."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from benchmarks.compare_routers.agents import AGENTIC, Agents, agents_at
from benchmarks.compare_routers.contenders import OPTIONAL_PACKAGE_HINT, PACKAGE_HINTS
from benchmarks.compare_routers.prompts import Prompts
from benchmarks.compare_routers.results import measure
from benchmarks.compare_routers.results.rows import Key, Row
from benchmarks.compare_routers.runs import endforward_check
from benchmarks.compare_routers.runs.agents_client import Played, play
from benchmarks.compare_routers.runs.endforward_check import (
    MissingReportsError,
    router_misses,
    silent,
    silent_prefill,
)
from benchmarks.compare_routers.runs.engines import Engines
from benchmarks.compare_routers.workloads import TurnWords, arrivals
from benchmarks.demo.load import Arrival, Sample, run_load
from benchmarks.demo.runs import RouterStartError, router_process
from benchmarks.listener import ReceivedMessage
from benchmarks.router_processes import Contender, Processes
from sglang_sbs.cluster.plan import ProcessPlan
from sglang_sbs.observe.recorder import TrafficRecorder
from sglang_sbs.scheduling import SchedulerConfig
from sglang_sbs.scheduling.eventlog import EventLogWriter

WARM_UP_REQUESTS = 24
_WARM_UP_LOAD = 0.5
_WARM_UP_SEED = 10_000
_STOP_GRACE_S = 1.5
"""Nothing is in flight when a router is stopped; some wait for longer all the same."""
_LAG_STEP_S = 0.02
_RECONNECT_S = 2.5
"""Engines look every 2 s at most for a router that was away, as ours is between two of its runs."""
_LISTEN_STEP_S = 0.25
_WARM_UP_TIMEOUT_S, _WARM_UP_SHARE = 20.0, 1 / 3
"""Least time of a request of the warm-up in seconds, and its share of the time of other
requests."""
_MOST_FAILED_SHARE = 0.25
"""Largest share of failed requests in the warm-up; a contender that fails more is not measured."""


@dataclass(frozen=True, slots=True)
class Setting:
    prompts: Prompts
    model: Path | None
    """Folder with the tokenizer; ``None``: requests carry token ids and routers get none."""
    slo_ttft_s: float
    slo_tpot_s: float
    timeout_s: float
    log_dir: Path
    salt: str
    """Seed of the prompts' words: engines that ran a comparison before must not have them
    cached."""
    endforward_host: str = "127.0.0.1"
    """Where a router of ours listens to the engines: all addresses if they may be elsewhere."""
    key_file: Path | None = None
    most_host_lag: float = 0.0
    """Share of a full pass beyond which the host lag keeps a run out of ratios; 0: no limit."""
    event_logs: bool = False
    """Whether each run leaves one: the scheduler's of ours, what ``sglang-sbs observe`` would write
    of the others."""
    stretch: float = 1.0
    """Of agents' pauses, as of everything that takes time here."""
    settle_s: float = 0.3
    """After the last answer, for the last messages of the engines."""
    reports_wait_s: float = endforward_check.WAIT_S


class DoesNotWorkError(RuntimeError):
    """The contender serves nothing on these engines; the message says what it said."""

    def __init__(self, message: str, failed: int = 0) -> None:
        super().__init__(message)
        self.failed = failed
        """Requests of the warm-up that were not answered."""


async def run_cell(
    contender: Contender,
    key: Key,
    requests: int,
    engines: Engines,
    setting: Setting,
) -> Row:
    """Run it, with a warm-up that is in no figure.

    A contender that does not start, fails much of the warm-up or does not finish is tried once
    more, and then gives a row with ``error``.

    Raises:
        MissingReportsError: EndForward of a prefill rank does not arrive here or at our router.
    """
    failed = 0
    try:
        try:
            return await _measured(contender, key, requests, engines, setting)
        except DoesNotWorkError as error:
            if not contender.installed:
                raise
            failed = error.failed
        # What it answered of the first attempt is in prefix caches.
        again = dataclasses.replace(setting, salt=f"{setting.salt}/again")
        row = await _measured(contender, key, requests, engines, again)
        return replace(row, warm_up_failed=failed + row.warm_up_failed)
    except DoesNotWorkError as error:
        return Row(
            key=key,
            requests=requests,
            warm_up_failed=failed + error.failed,
            error=str(error),
        )


async def _measured(
    contender: Contender, key: Key, requests: int, engines: Engines, setting: Setting
) -> Row:
    """Raises: DoesNotWorkError; MissingReportsError."""
    begun_s = time.monotonic()
    send = _load(key, requests, engines, setting)
    warm_key = Key("paper", _WARM_UP_LOAD, _WARM_UP_SEED + key.seed, key.policy)
    # Of the run's key too: the same words before another run would be in the prefix caches.
    warm_up = _arrivals(warm_key, WARM_UP_REQUESTS, engines, setting, f"{warm_key} of {key}")
    async with _running(contender, key, engines, setting) as (url, processes):
        if contender.ours:
            await asyncio.sleep(_RECONNECT_S)
        warm_up_timeout_s = max(_WARM_UP_TIMEOUT_S, _WARM_UP_SHARE * setting.timeout_s)
        warmed = await run_load(url, warm_up, timeout_s=warm_up_timeout_s)
        warm_up_failed = _check(warmed)
        await _check_reports(contender, engines, setting.reports_wait_s)
        engines.listener.take()
        cpu_s, stalled_s = processes.cpu_s(), await _stalled_s(contender, engines)
        lag = asyncio.create_task(_watch_lag(), name="host lag")
        try:
            played = await send(url)
        finally:
            lag.cancel()
        await asyncio.sleep(setting.settle_s)
        received = engines.listener.take()
        cpu_s = processes.cpu_s() - cpu_s
        stalled_s = await _stalled_s(contender, engines) - stalled_s
    begin_s, load_s = played.begin_s, played.load_s
    if setting.event_logs and not contender.ours:
        _observe(received, _event_log(key, setting))
    names = _names(engines, received)
    figures = measure.engines(received, names, begin_s, load_s)
    tokens = sum(sample.prompt_tokens + sample.output_tokens for sample in played.samples)
    computed = measure.computed_tokens(received, names)
    return Row(
        key=key,
        requests=requests,
        qps=requests / load_s,
        wall_s=time.monotonic() - begun_s,
        host_lag_ms=1e3 * await lag,
        most_host_lag_ms=1e3 * setting.most_host_lag * engines.full_pass_s,
        stalled_s=stalled_s,
        cpu_ms_per_request=1e3 * cpu_s / requests,
        tokens_per_s=tokens / load_s / len(engines.prefill),
        computed_over_optimum=computed / played.optimum_tokens if played.optimum_tokens else 0.0,
        warm_up_failed=warm_up_failed + played.warm_up_failed,
        answers=measure.answers(played.samples, setting.slo_ttft_s, setting.slo_tpot_s, load_s),
        engines=figures,
        silent=silent(received, names),
    )


def _load(
    key: Key, requests: int, engines: Engines, setting: Setting
) -> Callable[[str], Awaitable[Played]]:
    """Draw the arrivals of a run; the result sends them to a URL."""
    if key.workload == AGENTIC:
        number = agents_at(key.load, len(engines.prefill) * engines.dp_size)
        agents = Agents(number, key.seed, engines.chunk_tokens, setting.stretch)
        words = TurnWords(setting.prompts, f"{setting.salt}/{key}")
        return lambda url: play(url, agents, words, requests, timeout_s=setting.timeout_s)
    load = _arrivals(key, requests, engines, setting, f"{key}")

    async def send(url: str) -> Played:
        begin_s = time.monotonic()
        samples = await run_load(url, load, timeout_s=setting.timeout_s)
        return Played(begin_s, samples, load[-1].at_s)

    return send


def _arrivals(
    key: Key, requests: int, engines: Engines, setting: Setting, content: str
) -> list[Arrival]:
    return arrivals(
        key.workload,
        seed=key.seed,
        requests=requests,
        tokens_per_s=key.load * engines.capacity_tokens_per_s,
        chunk_tokens=engines.chunk_tokens,
        prompts=setting.prompts,
        content=f"{setting.salt}/{content}",
    )


async def _watch_lag() -> float:
    """How late a short sleep ends, seconds, 99th percentile; until it is cancelled."""
    late_s = [0.0]
    with suppress(asyncio.CancelledError):
        while True:
            begun_s = time.monotonic()
            await asyncio.sleep(_LAG_STEP_S)
            late_s.append(time.monotonic() - begun_s - _LAG_STEP_S)
    return sorted(late_s)[int(0.99 * (len(late_s) - 1))]


def _check(warmed: list[Sample]) -> int:
    """How many failed, if few. Raises: DoesNotWorkError."""
    errors = [sample.error for sample in warmed if sample.error]
    if len(errors) > _MOST_FAILED_SHARE * len(warmed):
        raise DoesNotWorkError(
            f"{len(errors)} of {len(warmed)} requests failed at half load: {errors[0][:500]}",
            len(errors),
        )
    return len(errors)


async def _check_reports(contender: Contender, engines: Engines, wait_s: float) -> None:
    """Raises: MissingReportsError."""
    ports = engines.ports
    received = engines.listener.take()
    until_s = time.monotonic() + wait_s
    while missing := silent_prefill(received, _names(engines, received)):
        if time.monotonic() > until_s:
            break
        await asyncio.sleep(_LISTEN_STEP_S)
        received += engines.listener.take()
    if missing:
        raise MissingReportsError(
            f"no EndForward of {', '.join(missing)} comes to {engines.listener.bind}: "
            "SGLANG_SBS_ROUTERS of every engine must name the router's port "
            f"{ports.endforward} and this one, both must be reachable from there, and "
            "SGLANG_SBS_ENDFORWARD_KEY_FILE there and --key-file here be the same secret, or both "
            "unset"
        )
    if not contender.ours:
        return
    missing = await router_misses(
        f"http://127.0.0.1:{ports.prometheus}/metrics",
        {name: url for name, url in _urls(engines).items() if name.startswith("p")},
        received,
        _names(engines, received),
        wait_s,
    )
    if missing:
        raise MissingReportsError(
            f"the router {contender.name} receives nothing from {', '.join(missing)}: "
            "SGLANG_SBS_ROUTERS of every engine must name this machine's port "
            f"{ports.endforward}, and that must be reachable from there"
        )


async def _stalled_s(contender: Contender, engines: Engines) -> float:
    """Seconds in which the router's event loop has stood still; other projects' do not say."""
    if not contender.ours:
        return 0.0
    return await endforward_check.stalled_s(f"http://127.0.0.1:{engines.ports.prometheus}/metrics")


def _urls(engines: Engines) -> dict[str, str]:
    """Return the engines' URLs by short name."""
    prefill = {f"p{number}": url for number, (url, _port) in enumerate(engines.prefill)}
    return prefill | {f"d{number}": url for number, url in enumerate(engines.decode)}


def _names(engines: Engines, received: Sequence[ReceivedMessage]) -> dict[str, str]:
    return endforward_check.names_of(received, engines.names, _urls(engines))


@asynccontextmanager
async def _running(
    contender: Contender, key: Key, engines: Engines, setting: Setting
) -> AsyncIterator[tuple[str, Processes]]:
    """Its URL once it is ready, and its processes. Raises: DoesNotWorkError."""
    if not contender.installed:
        hint = PACKAGE_HINTS.get(contender.package, OPTIONAL_PACKAGE_HINT)
        raise DoesNotWorkError(f"{contender.package} is not installed; {hint}")
    ports = engines.ports
    argv = contender.command(engines.prefill, engines.decode, ports.http, ports.prometheus)
    if contender.ours:
        argv += _own_flags(key, ports.endforward, setting)
    if (contender.ours or contender.tokenizes) and setting.model is not None:
        argv += ["--tokenizer-path", str(setting.model)]
    log = setting.log_dir / f"router-{_file_name(contender.name)}.log"
    plan = ProcessPlan(contender.name, tuple(argv), dict(os.environ), log)
    url = f"http://127.0.0.1:{ports.http}"
    try:
        async with router_process(plan, url, (contender.ready_path,), _STOP_GRACE_S) as process:
            yield url, Processes(process.pid)
    except RouterStartError as error:
        raise DoesNotWorkError(str(error)) from error


def _own_flags(key: Key, endforward_port: int, setting: Setting) -> list[str]:
    """Return the flags that a router of ours gets beside those of its contender."""
    argv = ["--sbs-endforward-bind", f"tcp://{setting.endforward_host}:{endforward_port}"]
    if setting.key_file is not None:
        argv += ["--sbs-endforward-key-file", str(setting.key_file)]
    if setting.event_logs:
        argv += ["--sbs-event-log", str(_event_log(key, setting))]
    return argv


def _event_log(key: Key, setting: Setting) -> Path:
    name = f"{key.workload}-{key.load:g}-{key.seed}-{_file_name(key.policy)}.events"
    return setting.log_dir / name


def _observe(received: Sequence[ReceivedMessage], path: Path) -> None:
    """Write the log that ``sglang-sbs observe`` would have written of these messages."""
    recorder = TrafficRecorder()
    for message in received:
        recorder.receive(message.report, message.at_s)
    log = EventLogWriter(path, SchedulerConfig(), observed=True)
    try:
        for record in recorder.due(float("inf")):
            assert record.event is not None
            log.write(record.now_s, record.event, record.commands)
    finally:
        log.close()


def _file_name(name: str) -> str:
    return re.sub(r"\W+", "-", name)
