"""What one engine says of itself, judged: reach, version, limits, flags, latency, room."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from sglang_sbs.doctor.checks.fields import number, text
from sglang_sbs.doctor.facts import EngineFacts
from sglang_sbs.doctor.findings import Finding, finding
from sglang_sbs.router.workers.server_info import (
    MIN_VERSION,
    NO_DP_ATTENTION,
    PLUGIN_VERSION,
    WorkerInfo,
    parse_version,
    ranks_in_reach,
    server_url,
)

MIN_CHUNK_TOKENS = 512
"""Per rank; passes below it are mostly fixed cost (the paper: 3K and 5K)."""
MIN_RUNNING_REQUESTS = 8
HIGH_RTT_S = 0.05
"""Of the fastest round trip: a quarter of a short forward pass."""
JITTER_S = 0.1
CLOCK_S = 1.0
_REORDERING = {
    "lpm": "the longest cached prefix first",
    "hrrn": "by waiting time over uncached tokens",
    "shortest-prefill-first": "the shortest first, and a cut prompt gets what they leave of the "
    "chunk",
}
"""What SGLang's ``schedule_policy.py`` does under the policies that people set for speed. All of
them take one of several new prompts that begin alike, and leave the others for the next pass."""
FULL = 0.9
"""Share of KV tokens or slots in use from which a rank counts as full."""


def check_engine(facts: EngineFacts) -> Iterator[Finding]:
    """Everything about one engine that needs no other one."""
    for said in _checks(facts):
        yield finding(said[0], facts.url, *said[1:])


_Said = tuple[str, str] | tuple[str, str, str]
"""Id, what was seen, and maybe what to change."""


def _checks(facts: EngineFacts) -> Iterator[_Said]:
    yield from _reach(facts)
    if facts.info is None:
        return
    yield from _version(facts.info)
    yield from _limits(facts, facts.info)
    conflicts = list(_conflicts(facts, facts.info))
    yield from conflicts or [("flags.ok", "nothing that gets in the way")]
    yield from _latency(facts)
    if facts.target.role == "decode":
        yield from _room(facts, facts.info)


def _reach(facts: EngineFacts) -> Iterator[_Said]:
    url, role = facts.url, facts.target.role
    if facts.failure is not None:
        if facts.failure.kind != "refused":  # the keys are a matter of their own
            yield f"reach.{facts.failure.kind}", facts.failure.text
    elif facts.info is None:
        mode = text(facts.data, "disaggregation_mode")
        numbers = parse_version(text(facts.data, "version"))
        if mode not in ("", role):
            seen = f"runs with --disaggregation-mode {mode} and is given as --{role}"
            change = f"relaunch it with --disaggregation-mode {role}"
            if mode != "null":
                change = f"list it under --{mode}, or {change}"
            yield "reach.wrong-role", seen, change
        elif numbers is not None and (0, 0, 0) < numbers < MIN_VERSION:
            yield "version.too-old", facts.unusable
        else:
            kind = "rank-server" if facts.rank_out_of_reach else "unusable"
            yield f"reach.{kind}", facts.unusable
    elif facts.ready_status not in (200, 404):
        status = facts.ready_status
        yield "reach.not-ready", f"/ready answers {status}" if status else "/ready is silent"
    else:
        scheme = "HTTPS" if url.startswith("https") else "HTTP"
        seen = f"answers over {scheme}, ready for requests"
        if facts.info.rust_server and facts.info.dp_size > 1:
            last = ranks_in_reach(facts.info)[-1]
            seen += f", each DP rank at its own port to {server_url(url, facts.info, last)}"
            if last < facts.info.dp_size - 1:
                seen += (
                    f"; ranks {last + 1} to {facts.info.dp_size - 1} are on other nodes, not asked"
                )
        yield "reach.ok", seen


def _version(info: WorkerInfo) -> Iterator[_Said]:
    numbers = parse_version(info.version)
    if numbers is None or numbers == (0, 0, 0):
        said = f"calls itself {info.version!r}" if info.version else "does not say its version"
        yield "version.unknown", said
    elif numbers < PLUGIN_VERSION and info.sbs is None:
        yield "version.needs-patch", f"runs SGLang {info.version}"
    if info.coupled:
        yield "version.coupled", f"runs SGLang {info.version}"


def _limits(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Said]:
    prefill = facts.target.role == "prefill"
    found = list(_limits_of_prefill(facts, info)) if prefill else []
    if info.no_barrier == NO_DP_ATTENTION:
        seen = f"dp {info.dp_size} without --enable-dp-attention"
        found.append(("limits.no-dp-attention", seen))
    elif info.no_barrier and prefill:
        found.append(("limits.no-barrier", info.ranks))
    if 0 < info.max_running_requests < MIN_RUNNING_REQUESTS:
        seen = f"{info.max_running_requests} requests per rank at most"
        found.append(("limits.few-running", seen))
    yield from found or [("limits.ok", describe_limits(info, prefill=prefill))]


def describe_limits(info: WorkerInfo, *, prefill: bool) -> str:
    """The numbers SBS goes by, in a line."""
    parts = [f"{info.dp_size} DP rank{'s' if info.dp_size > 1 else ''}"]
    if prefill:
        parts.append(f"{info.chunk_tokens} tokens per rank and pass")
        if info.prefill_max_requests:
            parts.append(f"{info.prefill_max_requests} requests per rank and pass")
    else:
        parts.append(f"{info.kv_capacity_tokens} KV tokens per rank")
    parts.append(f"{info.max_running_requests} requests per rank")
    parts.append(f"page size {info.page_size}")
    return ", ".join(parts)


def _limits_of_prefill(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Said]:
    chunk = number(facts.data, "chunked_prefill_size")
    if info.dp_size == 1:
        yield "limits.dp-one", "one DP rank"
    if chunk <= 0:
        yield "limits.no-chunking", f"chunked_prefill_size is {chunk}, that is, off"
        return
    wanted = MIN_CHUNK_TOKENS * info.dp_size
    if chunk < MIN_CHUNK_TOKENS:
        yield (
            "limits.chunk-small",
            f"{chunk} tokens per rank and pass (--chunked-prefill-size {chunk * info.dp_size} over "
            f"{info.dp_size} ranks)",
            f"SGLang divides it by the DP size: --chunked-prefill-size {wanted} at least",
        )
    if info.page_size > 1 and chunk % info.page_size:
        yield "limits.chunk-page", f"chunk {chunk} per rank, page size {info.page_size}"
    if 0 < info.max_prefill_tokens < chunk:
        yield (
            "limits.max-prefill-tokens",
            f"--max-prefill-tokens {info.max_prefill_tokens}, chunk per rank {chunk}",
            f"--max-prefill-tokens {chunk} at least; SGLang does not divide it",
        )


def _conflicts(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Said]:
    data, prefill = facts.data, facts.target.role == "prefill"
    method = info.load_balance_method
    if prefill and method not in ("", "auto", "follow_bootstrap_room"):
        yield "flags.load-balance", f"--load-balance-method {method}"
    if info.rank_choice == "engine" and info.dp_size > 1:
        yield "flags.decode-ranks", f"--load-balance-method {method}"
    if prefill:
        yield from _delayers(data)
    if data.get("sleep_on_idle") is True and info.dp_size > 1:
        yield "flags.sleep-on-idle", "--sleep-on-idle is set"
    if info.rust_server and info.dp_size > 1 and info.sbs is None:
        yield "flags.rust-idle", "SGLANG_RUST_SERVER=1 without the plugin"
    if prefill and data.get("disable_overlap_schedule") is True:
        yield "flags.overlap-disabled", "overlap scheduling is off"
    policy = text(data, "schedule_policy")
    if prefill and policy not in ("", "fcfs"):
        does = f": {_REORDERING[policy]}" if policy in _REORDERING else ""
        change = f"start prefill engines with --schedule-policy fcfs instead of {policy}"
        yield "flags.schedule-policy", f"--schedule-policy {policy}{does}", change
    if prefill and number(data, "pp_size") > 1:
        yield "flags.pipeline", f"--pp-size {number(data, 'pp_size')}"
    if data.get("enable_pd_role_switch") is True:
        yield "flags.role-switch", "--enable-pd-role-switch is set"


def _delayers(data: dict[str, Any]) -> Iterator[_Said]:
    """What holds prefill back in the engine. The second and the third count running requests, of
    which a prefill engine has none (``prefill_delayer.py``, ``min_free_slots_delayer.py``)."""
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


def _latency(facts: EngineFacts) -> Iterator[_Said]:
    trips_s = facts.rtts_s
    if not trips_s:
        return
    fastest, middle, slowest = min(trips_s), statistics.median(trips_s), max(trips_s)
    seen = (
        f"{len(trips_s)} round trips: fastest {fastest * 1e3:.1f} ms, "
        f"median {middle * 1e3:.1f} ms, slowest {slowest * 1e3:.1f} ms"
    )
    if fastest > HIGH_RTT_S:
        yield "latency.high", seen
    if slowest - fastest > JITTER_S:
        yield "latency.jitter", seen
    offset_s, clock = facts.clock_offset_s, ""
    if offset_s is not None and abs(offset_s) > CLOCK_S:
        yield "latency.clock", f"{offset_s:+.1f} s against this machine"
    elif offset_s is not None:
        clock = f"; clock {offset_s * 1e3:+.0f} ms"
    if fastest <= HIGH_RTT_S and slowest - fastest <= JITTER_S:
        yield "latency.ok", seen + clock


def _room(facts: EngineFacts, info: WorkerInfo) -> Iterator[_Said]:
    loads = facts.loads
    if loads is None or not info.kv_capacity_tokens or not info.max_running_requests:
        yield "room.unknown", "no loads of every rank"
        return
    kv = [used / info.kv_capacity_tokens for used in loads.kv_tokens]
    slots = [running / info.max_running_requests for running in loads.running_requests]
    found: list[_Said] = [
        (name, seen)
        for name, shares, what in (
            ("room.kv-full", kv, "KV tokens in use"),
            ("room.slots-full", slots, "slots in use"),
        )
        if (seen := _full(shares, what))
    ]
    seen = (
        f"fullest rank: {max(kv):.0%} of {info.kv_capacity_tokens} KV tokens, {max(slots):.0%} "
        f"of {info.max_running_requests} slots in use"
    )
    yield from found or [("room.ok", seen)]


def _full(shares: list[float], what: str) -> str:
    """Which ranks are; empty: none is."""
    ranks = [f"rank {rank}: {share:.0%}" for rank, share in enumerate(shares) if share >= FULL]
    return f"{what} on {', '.join(ranks[:8])}{' …' if len(ranks) > 8 else ''}" if ranks else ""
