"""Judges single engines: reach, version, limits, flags, latency, room."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, listed, number, text
from sglang_sbs.doctor.findings import Finding, Findings
from sglang_sbs.router.workers import server_info
from sglang_sbs.router.workers.server_info import WorkerInfo

MIN_CHUNK_TOKENS = 512
"""Threshold for a finding about small chunks, in tokens per rank: smaller passes are mostly fixed
cost (the paper uses 3K and 5K)."""
MIN_RUNNING_REQUESTS = 8
HIGH_RTT_S = 0.05
"""Threshold, in seconds, for the fastest round trip: a quarter of a short forward pass."""
JITTER_S = 0.1
CLOCK_S = 1.0
_REORDERING = {
    "lpm": "the longest cached prefix first",
    "hrrn": "by waiting time over uncached tokens",
    "shortest-prefill-first": "the shortest first, and a cut prompt gets what they leave of the "
    "chunk",
}
"""Effect of SGLang's ``schedule_policy.py`` by value of ``--schedule-policy``. Under each of these
policies a pass takes only one of several new prompts with the same beginning."""
FULL = 0.9
"""Share of KV tokens or slots in use above which a rank counts as full."""

finding = Findings("""
ok reach.ok
error reach.unreachable -> check that the engine runs, and the host and port of this URL (its --host
    and --port)
error reach.silent -> look at the engine's log; raise --timeout if a forward pass takes that long
error reach.wrong-scheme -> write the URL with the other scheme
error reach.certificate -> give --ca-cert-paths FILE (and --client-cert-path, --client-key-path), as
    to the router
error reach.not-sglang -> give the URL of an engine's --port; not of its bootstrap, metrics or other
    port
error reach.is-a-router -> give it with --router, and the engines' own URLs with --prefill and
    --decode
error reach.wrong-role -> list it under the other flag, or relaunch it with the other
    --disaggregation-mode
error reach.unusable -> look at its /server_info; is that an unmodified SGLang?
error reach.rank-server -> give the address of DP rank 0 and open the ports behind it, or start the
    engine without SGLANG_RUST_SERVER
error reach.not-ready -> wait for it, or continue generation (POST /continue_generation)
error version.too-old -> upgrade the engine
warning version.needs-patch -> on the engine's machine: sglang-sbs patch apply, then restart it; or
    upgrade SGLang
warning version.coupled -> upgrade the engine to 0.5.10 or later if you can
error version.kv-release -> upgrade decode engines to SGLang 0.5.21 or later (mori: 0.5.22)
note version.unknown -> nothing; make sure that it is newer than 0.5.11
ok limits.ok
warning limits.dp-one -> start prefill engines with --attn-dp-size N, N > 1 (before SGLang 0.5.22:
    --dp-size N --enable-dp-attention)
warning limits.no-dp-attention -> write --attn-dp-size N instead of --dp-size N (before SGLang
    0.5.22: add --enable-dp-attention)
note limits.elastic -> nothing; expect requests to a rank that leaves to fail, and its place in the
    cluster to be right again within seconds
note limits.no-barrier -> nothing, if that is wanted: SBS needs no setting for it
warning limits.no-chunking -> set --chunked-prefill-size (N tokens per rank x DP size)
warning limits.chunk-small -> SGLang divides --chunked-prefill-size by the DP size: for N tokens per
    rank start the engine with --chunked-prefill-size N x DP
note limits.chunk-page -> choose --chunked-prefill-size as a multiple of page size x DP size
warning limits.max-prefill-tokens -> raise --max-prefill-tokens to the chunk per rank at least;
    SGLang does not divide it
warning limits.few-running -> raise --max-running-requests; SGLang divides it by the DP size
ok flags.ok
warning flags.load-balance -> leave --load-balance-method out (auto), or write follow_bootstrap_room
warning flags.prefill-delayer -> start prefill engines without --enable-prefill-delayer
note flags.prefill-delayer-queue -> start prefill engines without --prefill-delayer-queue-min-ratio
    and --prefill-delayer-max-delay-ms
note flags.min-free-slots-delay -> start prefill engines without --min-free-slots-delay
warning flags.sleep-on-idle -> start engines without --sleep-on-idle
warning flags.rust-idle -> install the plugin next to SGLang and set SGLANG_SBS_ROUTERS
note flags.overlap-disabled -> leave --disable-overlap-schedule out unless a feature needs it
note flags.schedule-policy -> leave --schedule-policy at fcfs on prefill engines
note flags.pipeline -> prefer tensor and data parallelism on prefill engines where memory allows
error flags.kv-release -> unset SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE on decode engines
error flags.abort-on-priority -> start the engine with --enable-priority-scheduling or without
    --abort-on-priority-when-disabled
ok latency.ok
warning latency.high -> run the router in the same network as the engines; mind proxies between them
note latency.jitter -> after start-up POST /freeze_gc to each engine (SGLang does so itself unless
    --skip-server-warmup is set)
note latency.clock -> run NTP or chrony on the engine's machine
ok room.ok
warning room.kv-full -> add decode instances or memory (--mem-fraction-static), or send less
warning room.slots-full -> raise --max-running-requests, add decode instances, or send less
note room.unknown -> nothing; SGLang 0.5.14 and later do
""")


def check(facts: ClusterFacts) -> Iterator[Finding]:
    """Check each engine for faults that are visible without comparing it with others."""
    for engine in facts.engines:
        for name, *seen in _checks(engine):
            yield finding(name, engine.url, *seen)


_Found = tuple[str, str] | tuple[str, str, str]
"""Id, observation, and optionally what to change."""


def _checks(facts: EngineFacts) -> Iterator[_Found]:
    yield from _reach(facts)
    if facts.info is None:
        return
    yield from _version(facts.info)
    if facts.role == "decode" and not facts.info.defers_release:
        yield _release(facts.info)
    yield from _limits(facts, facts.info)
    yield from list(_conflicts(facts, facts.info)) or [("flags.ok", "nothing that gets in the way")]
    yield from _latency(facts)
    if facts.role == "decode":
        yield from _room(facts, facts.info)


def _reach(facts: EngineFacts) -> Iterator[_Found]:
    url, role, info = facts.url, facts.role, facts.info
    if facts.failure is not None:
        if facts.failure.kind != "refused":  # a wrong key has its own findings
            yield f"reach.{facts.failure.kind}", facts.failure.text
    elif info is None:
        mode = text(facts.data, "disaggregation_mode")
        numbers = server_info.parse_version(text(facts.data, "version"))
        if mode not in ("", role):
            seen = f"runs with --disaggregation-mode {mode} and is given as --{role}"
            change = f"relaunch it with --disaggregation-mode {role}"
            if mode != "null":
                change = f"list it under --{mode}, or {change}"
            yield "reach.wrong-role", seen, change
        elif numbers is not None and (0, 0, 0) < numbers < server_info.MIN_VERSION:
            yield "version.too-old", str(facts.unusable)
        else:
            elsewhere = isinstance(facts.unusable, server_info.RankOutOfReach)
            yield f"reach.{'rank-server' if elsewhere else 'unusable'}", str(facts.unusable)
    elif facts.ready_status not in (200, 404):
        status = facts.ready_status
        yield "reach.not-ready", f"/ready answers {status}" if status else "/ready is silent"
    else:
        scheme = "HTTPS" if url.startswith("https") else "HTTP"
        seen = f"answers over {scheme}, ready for requests"
        if info.rust_server and info.dp_size > 1:
            last = server_info.ranks_in_reach(info)[-1]
            seen += f", each DP rank at its own port to {server_info.server_url(url, info, last)}"
            if last < info.dp_size - 1:
                seen += f"; ranks {last + 1} to {info.dp_size - 1} are on other nodes, not asked"
        yield "reach.ok", seen


def _version(info: WorkerInfo) -> Iterator[_Found]:
    numbers = server_info.parse_version(info.version)
    if numbers is None or numbers == (0, 0, 0):
        shown = f"reports version {info.version!r}" if info.version else "reports no version"
        yield "version.unknown", shown
    elif numbers < server_info.PLUGIN_VERSION and info.sbs is None:
        yield "version.needs-patch", f"runs SGLang {info.version}"
    if info.coupled:
        yield "version.coupled", f"runs SGLang {info.version}"


def _release(info: WorkerInfo) -> _Found:
    """Describe an engine that frees KV pages while prefill may still write to them
    (``relay/parking.py``)."""
    backend = info.transfer_backend or "mooncake"
    runs = f"SGLang {info.version or '?'} with transfer backend {backend}"
    first = server_info.DEFERRED_RELEASE.get(backend)
    numbers = server_info.parse_version(info.version)
    if (
        first
        and info.sbs is not None
        and info.sbs.deferred_release is False
        and numbers
        and (numbers >= first)
    ):
        return "flags.kv-release", f"{runs}, deferred release is off"
    return "version.kv-release", f"{runs} has no deferred release that is known to work"


def _limits(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Found]:
    prefill = facts.role == "prefill"
    found = list(_limits_of_prefill(facts, info)) if prefill else []
    if info.no_barrier == server_info.NO_DP_ATTENTION:
        seen = f"--dp-size {info.dp_size} without DP attention"
        found.append(("limits.no-dp-attention", seen))
    elif info.no_barrier and prefill:
        found.append(("limits.no-barrier", info.ranks))
    if (backend := text(facts.data, "elastic_ep_backend")) not in ("", "none"):
        seen = f"--elastic-ep-backend {backend}, now {info.dp_size} DP ranks"
        found.append(("limits.elastic", seen))
    if 0 < info.max_running_requests < MIN_RUNNING_REQUESTS:
        seen = f"{info.max_running_requests} requests per rank at most"
        found.append(("limits.few-running", seen))
    yield from found or [("limits.ok", describe_limits(info, facts.role))]


def describe_limits(info: WorkerInfo, role: str) -> str:
    parts = [f"{info.dp_size} DP rank{'s' if info.dp_size > 1 else ''}"]
    if role == "prefill":
        parts.append(f"{info.chunk_tokens} tokens per rank and pass")
        if info.prefill_max_requests:
            parts.append(f"{info.prefill_max_requests} requests per rank and pass")
    else:
        parts.append(f"{info.kv_capacity_tokens} KV tokens per rank")
    parts += [f"{info.max_running_requests} requests per rank", f"page size {info.page_size}"]
    return ", ".join(parts)


def _limits_of_prefill(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Found]:
    chunk = number(facts.data, "chunked_prefill_size")
    if info.dp_size == 1:
        yield "limits.dp-one", "one DP rank"
    if chunk <= 0:
        yield "limits.no-chunking", f"chunked_prefill_size is {chunk}, that is, off"
        return
    if chunk < MIN_CHUNK_TOKENS:
        given = f"--chunked-prefill-size {chunk * info.dp_size} over {info.dp_size} ranks"
        wanted = f"--chunked-prefill-size {MIN_CHUNK_TOKENS * info.dp_size} at least"
        change = f"SGLang divides it by the DP size: {wanted}"
        yield "limits.chunk-small", f"{chunk} tokens per rank and pass ({given})", change
    if info.page_size > 1 and chunk % info.page_size:
        yield "limits.chunk-page", f"chunk {chunk} per rank, page size {info.page_size}"
    if 0 < info.max_prefill_tokens < chunk:
        seen = f"--max-prefill-tokens {info.max_prefill_tokens}, chunk per rank {chunk}"
        change = f"--max-prefill-tokens {chunk} at least; SGLang does not divide it"
        yield "limits.max-prefill-tokens", seen, change


def _conflicts(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Found]:
    data, several = facts.data, info.dp_size > 1
    if facts.role == "prefill":
        yield from _conflicts_of_prefill(data, info)
    if data.get("sleep_on_idle") is True and several:
        yield "flags.sleep-on-idle", "--sleep-on-idle is set"
    if info.rust_server and several and info.sbs is None:
        yield "flags.rust-idle", "SGLANG_RUST_SERVER=1 without the plugin"
    aborts = data.get("abort_on_priority_when_disabled") is True
    if aborts and data.get("enable_priority_scheduling") is not True:
        yield "flags.abort-on-priority", "--abort-on-priority-when-disabled is set"


def _conflicts_of_prefill(data: dict[str, Any], info: WorkerInfo) -> Iterator[_Found]:
    """Find flags that do nothing useful on a prefill engine: ``--prefill-delayer-*`` and
    ``--min-free-slots-delay`` count running requests, and a prefill engine has none
    (``prefill_delayer.py``, ``min_free_slots_delayer.py``)."""
    if info.load_balance_method not in ("", "auto", "follow_bootstrap_room"):
        yield "flags.load-balance", f"--load-balance-method {info.load_balance_method}"
    if data.get("enable_prefill_delayer") is True:
        yield "flags.prefill-delayer", "--enable-prefill-delayer is set"
    queue = [
        f"--{name.replace('_', '-')} {data[name]:g}"
        for name in ("prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms")
        if isinstance(data.get(name), int | float)
    ]
    if queue:
        yield "flags.prefill-delayer-queue", ", ".join(queue)
    if (slots := number(data, "min_free_slots_delay")) > 1:
        yield "flags.min-free-slots-delay", f"--min-free-slots-delay {slots}"
    if data.get("disable_overlap_schedule") is True:
        yield "flags.overlap-disabled", "overlap scheduling is off"
    policy = text(data, "schedule_policy")
    if policy not in ("", "fcfs"):
        does = f": {_REORDERING[policy]}" if policy in _REORDERING else ""
        change = f"start prefill engines with --schedule-policy fcfs instead of {policy}"
        yield "flags.schedule-policy", f"--schedule-policy {policy}{does}", change
    if (stages := number(data, "pp_size")) > 1:
        yield "flags.pipeline", f"--pp-size {stages}"


def _latency(facts: EngineFacts) -> Iterator[_Found]:
    trips_s, offset_s = facts.rtts_s, facts.clock_offset_s
    if not trips_s:
        return
    fastest, middle, slowest = min(trips_s), statistics.median(trips_s), max(trips_s)
    seen = f"{len(trips_s)} round trips: fastest {fastest * 1e3:.1f} ms, "
    seen += f"median {middle * 1e3:.1f} ms, slowest {slowest * 1e3:.1f} ms"
    if fastest > HIGH_RTT_S:
        yield "latency.high", seen
    if slowest - fastest > JITTER_S:
        yield "latency.jitter", seen
    clock = ""
    if offset_s is not None and abs(offset_s) > CLOCK_S:
        yield "latency.clock", f"{offset_s:+.1f} s against this machine"
    elif offset_s is not None:
        clock = f"; clock {offset_s * 1e3:+.0f} ms"
    if fastest <= HIGH_RTT_S and slowest - fastest <= JITTER_S:
        yield "latency.ok", seen + clock


def _room(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Found]:
    loads, tokens, slots = facts.loads, info.kv_capacity_tokens, info.max_running_requests
    if loads is None or min(loads.kv_tokens) < 0 or not tokens or not slots:
        yield "room.unknown", "no loads of every rank"
        return
    kv_shares = [used / tokens for used in loads.kv_tokens]
    slot_shares = [running / slots for running in loads.running_requests]
    kv_full, slots_full = _full_ranks(kv_shares), _full_ranks(slot_shares)
    if kv_full:
        yield "room.kv-full", f"KV tokens in use on {kv_full}"
    if slots_full:
        yield "room.slots-full", f"slots in use on {slots_full}"
    if not kv_full and not slots_full:
        kv, slot = f"{max(kv_shares):.0%}", f"{max(slot_shares):.0%}"
        in_use = f"{kv} of {tokens} KV tokens, {slot} of {slots} slots in use"
        yield "room.ok", f"fullest rank: {in_use}"


def _full_ranks(shares: list[float]) -> str:
    return listed(f"rank {rank}: {share:.0%}" for rank, share in enumerate(shares) if share >= FULL)
