"""What one engine says of itself, judged: reach, version, limits, flags, latency, room."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from sglang_sbs.doctor.checks.fields import number, text
from sglang_sbs.doctor.facts import EngineFacts
from sglang_sbs.doctor.findings import Finding, finding
from sglang_sbs.router.engines.urls import rank_url
from sglang_sbs.router.workers.server_info import (
    MIN_VERSION,
    NO_DP_ATTENTION,
    PLUGIN_VERSION,
    WorkerInfo,
    parse_version,
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
    yield from _reach(facts)
    if facts.info is None:
        return
    yield from _version(facts, facts.info)
    yield from _limits(facts, facts.info)
    yield from _flags(facts, facts.info)
    yield from _latency(facts)
    if facts.target.role == "decode":
        yield from _room(facts, facts.info)


def _reach(facts: EngineFacts) -> Iterator[Finding]:
    url, role = facts.url, facts.target.role
    if facts.failure is not None:
        kind = facts.failure.kind
        if kind == "refused":  # the keys are a matter of their own
            return
        yield finding(f"reach.{kind}", url, facts.failure.text)
        return
    if facts.info is None:
        mode = text(facts.data, "disaggregation_mode")
        numbers = parse_version(text(facts.data, "version"))
        if mode not in ("", role):
            given = f"runs with --disaggregation-mode {mode} and is given as --{role}"
            if mode == "null":
                yield finding(
                    *("reach.wrong-role", url, given),
                    f"relaunch it with --disaggregation-mode {role}",
                )
            else:
                yield finding(
                    *("reach.wrong-role", url, given),
                    f"list it under --{mode}, or relaunch it with --disaggregation-mode {role}",
                )
        elif numbers is not None and (0, 0, 0) < numbers < MIN_VERSION:
            yield finding("version.too-old", url, facts.unusable)
        elif facts.rank_out_of_reach:
            yield finding("reach.rank-server", url, facts.unusable)
        else:
            yield finding("reach.unusable", url, facts.unusable)
        return
    if facts.ready_status not in (200, 404):
        status = facts.ready_status
        yield finding(
            "reach.not-ready", url, f"/ready answers {status}" if status else "/ready is silent"
        )
    else:
        scheme = "HTTPS" if url.startswith("https") else "HTTP"
        seen = f"answers over {scheme}, ready for requests"
        if facts.info.rust_server and facts.info.dp_size > 1:
            seen += f", each DP rank at its own port to {rank_url(url, facts.info.dp_size - 1)}"
        yield finding("reach.ok", url, seen)


def _version(facts: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    numbers = parse_version(info.version)
    if numbers is None or numbers == (0, 0, 0):
        said = f"calls itself {info.version!r}" if info.version else "does not say its version"
        yield finding("version.unknown", facts.url, said)
    elif numbers < PLUGIN_VERSION and info.sbs is None:
        yield finding("version.needs-patch", facts.url, f"runs SGLang {info.version}")
    if info.coupled:
        yield finding("version.coupled", facts.url, f"runs SGLang {info.version}")


def _limits(facts: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    url, prefill = facts.url, facts.target.role == "prefill"
    found = list(_limits_of_prefill(facts, info)) if prefill else []
    if info.no_barrier == NO_DP_ATTENTION:
        found.append(
            finding(
                "limits.no-dp-attention", url, f"dp {info.dp_size} without --enable-dp-attention"
            )
        )
    elif info.no_barrier and prefill:
        found.append(finding("limits.no-barrier", url, info.ranks))
    if 0 < info.max_running_requests < MIN_RUNNING_REQUESTS:
        found.append(
            finding(
                "limits.few-running", url, f"{info.max_running_requests} requests per rank at most"
            )
        )
    yield from found
    if not found:
        yield finding("limits.ok", url, describe_limits(info, prefill=prefill))


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


def _limits_of_prefill(facts: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    url, chunk = facts.url, number(facts.data, "chunked_prefill_size")
    if info.dp_size == 1:
        yield finding("limits.dp-one", url, "one DP rank")
    if chunk <= 0:
        yield finding("limits.no-chunking", url, f"chunked_prefill_size is {chunk}, that is, off")
        return
    wanted = MIN_CHUNK_TOKENS * info.dp_size
    if chunk < MIN_CHUNK_TOKENS:
        yield finding(
            "limits.chunk-small",
            url,
            f"{chunk} tokens per rank and pass (--chunked-prefill-size {chunk * info.dp_size} over "
            f"{info.dp_size} ranks)",
            f"SGLang divides it by the DP size: --chunked-prefill-size {wanted} at least",
        )
    if info.page_size > 1 and chunk % info.page_size:
        yield finding(
            "limits.chunk-page", url, f"chunk {chunk} per rank, page size {info.page_size}"
        )
    if 0 < info.max_prefill_tokens < chunk:
        yield finding(
            "limits.max-prefill-tokens",
            url,
            f"--max-prefill-tokens {info.max_prefill_tokens}, chunk per rank {chunk}",
            f"--max-prefill-tokens {chunk} at least; SGLang does not divide it",
        )


def _flags(facts: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    found = list(_conflicts(facts, info))
    yield from found
    if not found:
        yield finding("flags.ok", facts.url, "nothing that gets in the way")


def _conflicts(facts: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    url, data, prefill = facts.url, facts.data, facts.target.role == "prefill"
    if prefill and info.load_balance_method not in ("", "auto", "follow_bootstrap_room"):
        yield finding(
            "flags.load-balance", url, f"--load-balance-method {info.load_balance_method}"
        )
    if info.rank_choice == "engine" and info.dp_size > 1:
        yield finding(
            "flags.decode-ranks", url, f"--load-balance-method {info.load_balance_method}"
        )
    if prefill:
        yield from _delayers(url, data)
    if data.get("sleep_on_idle") is True and info.dp_size > 1:
        yield finding("flags.sleep-on-idle", url, "--sleep-on-idle is set")
    if info.rust_server and info.dp_size > 1 and info.sbs is None:
        yield finding("flags.rust-idle", url, "SGLANG_RUST_SERVER=1 without the plugin")
    if prefill and data.get("disable_overlap_schedule") is True:
        yield finding("flags.overlap-disabled", url, "overlap scheduling is off")
    policy = text(data, "schedule_policy")
    does = _REORDERING.get(policy)
    if prefill and policy not in ("", "fcfs"):
        yield finding(
            "flags.schedule-policy",
            url,
            f"--schedule-policy {policy}" + (f": {does}" if does else ""),
            f"start prefill engines with --schedule-policy fcfs instead of {policy}",
        )
    if prefill and number(data, "pp_size") > 1:
        yield finding("flags.pipeline", url, f"--pp-size {number(data, 'pp_size')}")
    if data.get("enable_pd_role_switch") is True:
        yield finding("flags.role-switch", url, "--enable-pd-role-switch is set")


def _delayers(url: str, data: dict[str, Any]) -> Iterator[Finding]:
    """What holds prefill back in the engine. The second and the third count running requests, of
    which a prefill engine has none (``prefill_delayer.py``, ``min_free_slots_delayer.py``)."""
    if data.get("enable_prefill_delayer") is True:
        yield finding("flags.prefill-delayer", url, "--enable-prefill-delayer is set")
    queue = [
        f"--{name.replace('_', '-')} {data[name]:g}"
        for name in ("prefill_delayer_queue_min_ratio", "prefill_delayer_max_delay_ms")
        if isinstance(data.get(name), int | float)
    ]
    if queue:
        yield finding("flags.prefill-delayer-queue", url, ", ".join(queue))
    if number(data, "min_free_slots_delay") > 1:
        slots = number(data, "min_free_slots_delay")
        yield finding("flags.min-free-slots-delay", url, f"--min-free-slots-delay {slots}")


def _latency(facts: EngineFacts) -> Iterator[Finding]:
    url = facts.url
    trips_s = facts.rtts_s
    if not trips_s:
        return
    fastest, middle, slowest = min(trips_s), statistics.median(trips_s), max(trips_s)
    seen = (
        f"{len(trips_s)} round trips: fastest {fastest * 1e3:.1f} ms, "
        f"median {middle * 1e3:.1f} ms, slowest {slowest * 1e3:.1f} ms"
    )
    fine = True
    if fastest > HIGH_RTT_S:
        fine = False
        yield finding("latency.high", url, seen)
    if slowest - fastest > JITTER_S:
        fine = False
        yield finding("latency.jitter", url, seen)
    offset_s = facts.clock_offset_s
    if offset_s is not None and abs(offset_s) > CLOCK_S:
        yield finding("latency.clock", url, f"{offset_s:+.1f} s against this machine")
    elif offset_s is not None:
        seen += f"; clock {offset_s * 1e3:+.0f} ms"
    if fine:
        yield finding("latency.ok", url, seen)


def _room(facts: EngineFacts, info: WorkerInfo) -> Iterator[Finding]:
    loads = facts.loads
    if loads is None or not info.kv_capacity_tokens or not info.max_running_requests:
        yield finding("room.unknown", facts.url, "no loads of every rank")
        return
    kv = [used / info.kv_capacity_tokens for used in loads.kv_tokens]
    slots = [running / info.max_running_requests for running in loads.running_requests]
    full_kv = [rank for rank, share in enumerate(kv) if share >= FULL]
    full_slots = [rank for rank, share in enumerate(slots) if share >= FULL]
    if full_kv:
        yield finding("room.kv-full", facts.url, _full(full_kv, kv, "KV tokens in use"))
    if full_slots:
        yield finding("room.slots-full", facts.url, _full(full_slots, slots, "slots in use"))
    if not full_kv and not full_slots:
        yield finding(
            "room.ok",
            facts.url,
            f"fullest rank: {max(kv):.0%} of {info.kv_capacity_tokens} KV tokens, {max(slots):.0%} "
            f"of {info.max_running_requests} slots in use",
        )


def _full(ranks: list[int], shares: list[float], what: str) -> str:
    shown = ", ".join(f"rank {rank}: {shares[rank]:.0%}" for rank in ranks[:8])
    return f"{what} on {shown}{' …' if len(ranks) > 8 else ''}"
