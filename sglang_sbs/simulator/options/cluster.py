"""Flags that describe a simulated prefill cluster (see :mod:`..cluster.spec`)."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from math import inf
from typing import Any, cast, get_args

from sglang_sbs.scheduling.events import PrefixSource
from sglang_sbs.simulator.cluster import spec
from sglang_sbs.simulator.cluster.arrangements import DEFLECT_CHUNK_TOKENS
from sglang_sbs.simulator.options.common import (
    Flag,
    add_all,
    add_overlap,
    checked,
    fields_of,
    not_negative,
    positive,
    positive_number,
)
from sglang_sbs.simulator.workloads.scenario import AGENTIC, LOAD_COUNTS, NETWORK

_INSTANCE_KEYS: dict[str, tuple[str, Callable[[str], float], str]] = {
    "count": ("count", positive, "a positive integer, as in count=2"),
    "dp": ("dp_size", positive, "a positive integer, as in dp=4"),
    "chunk": ("chunk_tokens", positive, "a positive integer, as in chunk=4096"),
    "speed": ("speed", positive_number, "a positive number, as in speed=0.5"),
}
_share = checked(not_negative, lambda share: share < 1, "a share below 1, as in 0.3")
_share_or_all = checked(
    not_negative, lambda share: share <= 1, "a share between 0 and 1, as in 0.1"
)
_tokens = checked(int, lambda n: n >= 0, "an integer, 0 for unbounded")
_graphs = checked(
    lambda text: tuple(sorted(set(map(int, text.split(","))))),
    lambda some: some[0] > 0,
    "token counts, as in 512,1024,2048",
)


def _instances(text: str) -> list[dict[str, float]]:
    """Parse ``count=2,dp=8,chunk=3072,speed=0.5`` into the fields of that many InstanceSpecs."""
    fields: dict[str, float] = {"count": 1}
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if not equals or key not in _INSTANCE_KEYS:
            raise argparse.ArgumentTypeError(
                f"{word!r}: write {'=, '.join(_INSTANCE_KEYS)}=, as in dp=4,speed=0.5"
            )
        name, parse, expected = _INSTANCE_KEYS[key]
        try:
            fields[name] = parse(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{word!r}: write {expected}") from error
    return [fields] * int(fields.pop("count"))


def _changes(text: str) -> tuple[spec.TopologyChange, ...]:
    """Parse ``30:drain:p1,50:down:p1``, in order of time."""
    changes = []
    for word in text.split(","):
        second, _, rest = word.partition(":")
        action, _, instance = rest.partition(":")
        if action not in spec.ACTIONS or not instance:
            raise argparse.ArgumentTypeError(
                f"{word!r}: write SECOND:ACTION:INSTANCE with {', '.join(spec.ACTIONS)}, as in "
                "30:drain:p1"
            )
        changes.append(
            spec.TopologyChange(not_negative(second), cast(spec.Action, action), instance)
        )
    return tuple(sorted(changes, key=lambda change: change.at_s))


# fmt: off
_CLUSTER = (
    Flag("--dp", "dp_size", positive, 8, "DP ranks per prefill instance (8)"),
    Flag("--latency-ms", "dispatch_latency_s", not_negative, 5.0, "dispatch latency (5)", per=1e3),
    Flag("--page-size", "page_size", positive, 1,
        "KV page of the prefill engines: each request is charged whole pages of the chunk (1)",
        "TOKENS"),
    Flag("--prefill-max-requests", "prefill_max_requests", _tokens, 0,
        "most requests of a rank in one pass, as the engines' flag of that name (0: unbounded)",
        "REQUESTS"),
    Flag("--captured-tokens", "captured_tokens", _graphs, (),
        "token counts of the engines' prefill CUDA graphs: smaller passes take as long as the next "
        "larger one (none)", "TOKENS,..."),
    Flag("--serial-ms", "dispatch_serial_s", not_negative, 1e3 * NETWORK["dispatch_serial_s"],
        "how far apart the requests of a batch reach the instance, one after the other "
        f"({1e3 * NETWORK['dispatch_serial_s']:g})", "MS", 1e3),
    Flag("--dispatch-jitter", "dispatch_jitter", not_negative, NETWORK["dispatch_jitter"],
        "lognormal sigma of each request's dispatch latency "
        f"({NETWORK['dispatch_jitter']:g})", "SIGMA"),
    Flag("--gang-gate-ms", "gang_gate_s", not_negative, 1e3 * NETWORK["gang_gate_s"],
        "how long engines wait for the rest of a batch, as with the plugin; 0: they start with "
        f"the requests present ({1e3 * NETWORK['gang_gate_s']:g})", "MS", 1e3),
    Flag("--jitter", "pass_jitter", not_negative, 0.0,
        "lognormal sigma of pass times, 0.15: about -/+ 15 %% (0)"),
    Flag("--first-pass-s", "first_pass_s", not_negative, 0.0,
        "extra time of each engine's first pass, for compiling and graph capture (0)", "S"),
    Flag("--gap-ms", "launch_gap_s", not_negative, 0.0,
        "engine work between a pass and the next (0)", per=1e3),
    Flag("--rank-pause-ms", "rank_pause_s", not_negative, 0.0,
        "mean of an exponential pause of each DP rank between two passes, on top of --gap-ms; the "
        "barrier waits for the longest (0)", "MS", 1e3),
    Flag("--intake-ms", "intake_s", not_negative, 0.0,
        "time per request of an intake that all instances share, one request after the other, as "
        "on a host short of CPU (0)", "MS", 1e3),
    Flag("--intake-until", "intake_until_s", positive_number, inf,
        "second from which --intake-ms applies no longer (never)", "S"),
)
_DECODE = (
    Flag("--no-barrier", "", bool, False,
        "DP ranks make passes of their own, as under DWDP; an idle rank costs nothing"),
    Flag("--decode-kv-tokens", "decode_kv_capacity_tokens", _tokens, 0,
        "KV capacity of each of the 32 decode ranks; requests that do not fit wait in the router "
        "under policies that hold requests, and in the engine under the others (0: unbounded)",
        "TOKENS"),
    Flag("--decode-running", "decode_max_running_requests", _tokens, 0,
        "most running requests per decode rank (0: unbounded)", "REQUESTS"),
    Flag("--decode-cache", "decode_cache", spec.DECODE_CACHES, "off",
        "seen, unseen: decode ranks keep the KV of requests that ended, so that it is not sent "
        "again, and the scheduler knows of it or not. Needs prefix caches (off)"),
    Flag("--transfer-us", "transfer_token_s", not_negative, 0.0,
        "KV transfer of a token from a prefill rank to decode in microseconds; 2.8: DeepSeek-V3 "
        "at 25 GB/s (0)", "US", 1e6),
    Flag("--decode-seconds", "decode_s", positive_number, 1.0,
        "how long a request keeps its place in decode (1)", "S"),
)
_CACHES = (
    Flag("--kv-tokens", "", _tokens, spec.KV_CAPACITY_TOKENS,
        "KV capacity of each prefill DP rank; 0: no prefix caches, and unbounded KV "
        f"({spec.KV_CAPACITY_TOKENS})", "TOKENS"),
    Flag("--host-kv-tokens", "", _tokens, None,
        "host memory below each rank's KV cache (HiCache); 0: none, and no storage "
        f"(agentic: {spec.TierSpec().host_kv_tokens}, else 0)", "TOKENS"),
    Flag("--storage", "", argparse.BooleanOptionalAction, None,
        "storage below host memory, which all ranks share (with host memory)"),
    Flag("--block-tokens", "", _tokens, 0,
        "give prefix caches with blocks of this size to the paper's scenarios as well; their "
        "prompts share no prefixes (0: no caches)", "TOKENS"),
    Flag("--prefix-source", "prefix_source", get_args(PrefixSource), "events",
        "source of each rank's cached prefixes for sbs and sbs_paper: its KV events, the prompts "
        "sent there, or none (events)"),
    Flag("--load-counts", "load_counts", LOAD_COUNTS, "prompt",
        "meaning of load 1.0. prompt: full chunks of all prompt tokens. uncached: the most that "
        "can be served if nothing is computed twice and all ranks are equally busy (prompt)"),
)
_ROBUSTNESS = (
    Flag("--burstiness", "burstiness", positive_number, 1.0,
        "arrivals with gamma gaps of this coefficient of variation; 1: Poisson, 3: bursts and "
        "lulls, below 1: more even. A trace has its own (1)", "CV"),
    Flag("--length-error", "length_error", _share, 0.0,
        "the scheduler gets each prompt length times a uniform factor, 0.3: 0.7 to 1.3; the engine "
        "computes the true length and reports it in EndForward (0)", "SHARE"),
    Flag("--length-factor", "length_factor", positive_number, 1.0,
        "the scheduler gets each prompt length times this; 2: twice too high (1)", "FACTOR"),
    Flag("--endforward-loss", "endforward_loss", _share_or_all, 0.0,
        "share of EndForward messages that never arrive; 1: an engine without plugin (0)",
        "SHARE"),
    Flag("--endforward-delay-ms", "endforward_delay_s", not_negative, 0.0,
        "mean of an exponential delay of each message, unknown to the scheduler; messages of "
        "different ranks overtake each other (0)", "MS", 1e3),
    Flag("--endforward-duplicates", "endforward_duplicates", _share_or_all, 0.0,
        "share of EndForward messages that arrive twice (0)", "SHARE"),
)
_INSTANCES = (
    Flag("--prefill", "", positive, None, "equal prefill instances (3)", "N"),
    Flag("--instance", "", _instances, None,
        "instead of --prefill, repeated: prefill instances that differ, as in count=2,dp=8 or "
        "dp=4,chunk=4096,speed=0.5. Keys left out are 1, --dp, --chunks and 1. Load 1.0 counts an "
        "instance by the tokens per second of its full chunks", "SPEC", repeated=True),
    Flag("--at", "changes", _changes, (),
        f"topology changes, {', '.join(spec.ACTIONS)}, as in 30:drain:p1,50:down:p1,70:up:p1. "
        "drain: no new requests, the old ones end. down: it dies, its requests fail and are sent "
        "again elsewhere. up: it is back; an instance joins then if that is its first change",
        "SECOND:ACTION:INSTANCE,..."),
    Flag("--short-pool", "short_pool", _tokens, 0,
        "N instances take short prompts only and the others long ones, with as much to compute per "
        "instance in both (0: all take all)", "N"),
    Flag("--pools", "pools", _tokens, 0,
        "N pools of equally many instances, each with a scheduler of its own; results have the "
        "schedulers' CPU time per decision (0: one scheduler, without its CPU time)", "N"),
    Flag("--pool-balance", "pool_balance", spec.POOL_BALANCES, "least",
        "the load balancer before pools sends a request to the one with the fewest in flight, to "
        "any, or to that of the conversation (least)"),
    Flag("--deflect-tokens", "deflect_tokens", _tokens, 0,
        "decode computes prompts of at most this length as well, "
        f"{DEFLECT_CHUNK_TOKENS} tokens per rank and step (0: none)", "TOKENS"),
)
# fmt: on


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the flags for latencies, faults and decode room of equal instances with ``--dp``
    ranks."""
    group = parser.add_argument_group("cluster")
    add_all(group, _CLUSTER)
    add_overlap(group)
    add_all(group, _DECODE)
    about = "for scenarios with shared prefixes: sessions, Mooncake traces"
    add_all(parser.add_argument_group("prefix caches", about), _CACHES)
    about = "information that reaches the scheduler wrong, late, twice or not at all"
    add_all(parser.add_argument_group("robustness", about), _ROBUSTNESS)


def add_topology(parser: argparse.ArgumentParser) -> None:
    """Add the flags for number, differences and changes of instances."""
    about = "they are called p0, p1, ... in the order of the flags"
    add_all(parser.add_argument_group("instances", about), _INSTANCES)


def cluster_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of :func:`add_cluster`'s flags as keywords of ``make_scenario``."""
    fields = fields_of(args, (*_CLUSTER, *_DECODE, *_CACHES, *_ROBUSTNESS))
    fields |= {"overlap": args.overlap, "barrier": not args.no_barrier}
    if args.block_tokens and args.kv_tokens:
        fields["block_tokens"] = args.block_tokens
    if args.kv_tokens:
        fields["kv_capacity_tokens"] = args.kv_tokens
    else:
        fields["block_tokens"] = 0
    # Agents have tiers by default; other workloads only if a flag for them is given.
    without = args.storage is False and _is_agentic(args)
    if args.host_kv_tokens is not None or args.storage or without:
        host = {} if args.host_kv_tokens is None else {"host_kv_tokens": args.host_kv_tokens}
        fields["tiers"] = spec.TierSpec(storage=args.storage is not False, **host)
    return fields


def _is_agentic(args: argparse.Namespace) -> bool:
    return getattr(args, "scenario", "") == AGENTIC


def topology_fields(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Return the values of :func:`add_topology`'s flags as keywords of ``make_scenario``."""
    if args.instance and args.prefill:
        parser.error("--prefill: --instance lists the instances (count=N for several equal ones)")
    instances = len(args.instance or ()) or args.prefill or 3
    if args.short_pool >= instances:
        parser.error(f"--short-pool {args.short_pool}: leave one of {instances} to long prompts")
    if args.pools and instances % args.pools:
        parser.error(f"--pools {args.pools}: {instances} instances cannot be divided so")
    if args.pools and (args.short_pool or args.deflect_tokens or args.at):
        parser.error("--pools: leave --short-pool, --deflect-tokens and --at out")
    if args.short_pool and (args.deflect_tokens or args.at):
        parser.error("--short-pool: leave --deflect-tokens and --at out")
    if args.short_pool and _is_agentic(args):
        parser.error(f"--short-pool: {AGENTIC} is a closed loop, in which lengths are not known")
    if args.pools and _is_agentic(args):
        parser.error(f"--pools: {AGENTIC} is a closed loop, and its agents cannot be divided")
    listed: dict[str, Any] = {
        "instances": args.instance or (),
        "prefill_instances": args.prefill or 3,
    }
    return listed | fields_of(args, _INSTANCES)
