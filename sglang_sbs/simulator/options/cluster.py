"""The flags that describe a simulated prefill cluster, and what they say as a cluster.

What they mean is documented where it is simulated (:mod:`sglang_sbs.simulator.cluster.spec`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, cast, get_args

import msgspec

from sglang_sbs.scheduling.events import PrefixSource
from sglang_sbs.simulator.cluster.arrangements import DEFLECT_CHUNK_TOKENS
from sglang_sbs.simulator.cluster.cache_tiers import TierSpec
from sglang_sbs.simulator.cluster.spec import ACTIONS, KV_CAPACITY_TOKENS, Action, TopologyChange
from sglang_sbs.simulator.options.common import add_overlap, not_negative, positive, positive_number
from sglang_sbs.simulator.workloads.scenario import AGENTIC, LOAD_COUNTS, NETWORK

_INSTANCE_KEYS: dict[str, tuple[str, Callable[[str], float], str]] = {
    "dp": ("dp_size", positive, "a positive integer, as in dp=4"),
    "chunk": ("chunk_tokens", positive, "a positive integer, as in chunk=4096"),
    "speed": ("speed", positive_number, "a positive number, as in speed=0.5"),
}
_COUNT_KEY = ("count", positive, "a positive integer, as in count=2")


_Actions = list[argparse.Action]


def add_cluster(parser: argparse.ArgumentParser) -> _Actions:
    """Flags for latencies, faults and decode room; equal instances of ``--dp`` ranks."""
    group = parser.add_argument_group("cluster")
    return [
        *_add_engines(group),
        *_add_network(group),
        *_add_passes(group),
        *_add_decode(group),
        *_add_caches(parser),
        *_add_robustness(parser),
    ]


def _add_engines(group: argparse._ArgumentGroup) -> _Actions:
    """How large instances are, and what of a batch fits into a pass."""
    add = group.add_argument
    return [
        add("--dp", type=positive, default=8, help="DP ranks per prefill instance (8)"),
        add("--latency-ms", type=not_negative, default=5.0, help="dispatch latency (5)"),
        add(
            "--page-size",
            type=positive,
            default=1,
            metavar="TOKENS",
            help="KV page of the prefill engines: each request is charged whole pages of the chunk "
            "(1)",
        ),
        add(
            "--prefill-max-requests",
            type=_tokens,
            default=0,
            metavar="REQUESTS",
            help="most requests of a rank in one pass, as the engines' flag of that name (0: "
            "unbounded)",
        ),
        add(
            "--captured-tokens",
            type=_graphs,
            default=(),
            metavar="TOKENS,...",
            help="token counts of the engines' prefill CUDA graphs: smaller passes take as long as "
            "the next larger one (none)",
        ),
    ]


def _add_network(group: argparse._ArgumentGroup) -> _Actions:
    """How a batch reaches its instance."""
    add = group.add_argument
    return [
        add(
            "--serial-ms",
            type=not_negative,
            default=1e3 * NETWORK["dispatch_serial_s"],
            metavar="MS",
            help="how far apart the requests of a batch reach the instance, one after the other "
            f"({1e3 * NETWORK['dispatch_serial_s']:g})",
        ),
        add(
            "--dispatch-jitter",
            type=not_negative,
            default=NETWORK["dispatch_jitter"],
            metavar="SIGMA",
            help="lognormal sigma of each request's dispatch latency "
            f"({NETWORK['dispatch_jitter']:g})",
        ),
        add(
            "--gang-gate-ms",
            type=not_negative,
            default=1e3 * NETWORK["gang_gate_s"],
            metavar="MS",
            help="how long engines wait for the rest of a batch, as with the plugin; 0: they start "
            f"with what is there ({1e3 * NETWORK['gang_gate_s']:g})",
        ),
    ]


def _add_passes(group: argparse._ArgumentGroup) -> _Actions:
    """How long passes take, and how they follow each other."""
    add = group.add_argument
    return [
        add(
            "--jitter",
            type=not_negative,
            default=0.0,
            help="lognormal sigma of pass times, 0.15: about -/+ 15 %% (0)",
        ),
        add(
            "--first-pass-s",
            type=not_negative,
            default=0.0,
            metavar="S",
            help="what the first pass of each engine takes on top: compiling, graph capture (0)",
        ),
        add(
            "--gap-ms",
            type=not_negative,
            default=0.0,
            help="engine work between a pass and the next (0)",
        ),
        add_overlap(group),
        add(
            "--no-barrier",
            action="store_true",
            help="DP ranks make passes of their own, as under DWDP; an idle rank costs nothing",
        ),
    ]


def _add_decode(group: argparse._ArgumentGroup) -> _Actions:
    """How much room decode has."""
    add = group.add_argument
    return [
        add(
            "--decode-kv-tokens",
            type=_tokens,
            default=0,
            metavar="TOKENS",
            help="KV capacity of each of the 32 decode ranks; policies that hold requests keep "
            "back what does not fit, with the others it waits in the engine (0: unbounded)",
        ),
        add(
            "--decode-running",
            type=_tokens,
            default=0,
            metavar="REQUESTS",
            help="most running requests per decode rank (0: unbounded)",
        ),
        add(
            "--decode-seconds",
            type=positive_number,
            default=1.0,
            metavar="S",
            help="how long a request keeps its place in decode (1)",
        ),
    ]


def _add_caches(parser: argparse.ArgumentParser) -> _Actions:
    """What prefill ranks keep of prompts."""
    add = parser.add_argument_group(
        "prefix caches", "of scenarios whose prompts share prefixes: sessions, Mooncake traces"
    ).add_argument
    return [
        add(
            "--kv-tokens",
            type=_tokens,
            default=KV_CAPACITY_TOKENS,
            metavar="TOKENS",
            help="KV capacity of each prefill DP rank; 0: no prefix caches, and unbounded KV "
            f"({KV_CAPACITY_TOKENS})",
        ),
        add(
            "--host-kv-tokens",
            type=_tokens,
            metavar="TOKENS",
            help="host memory below each rank's KV cache (HiCache); 0: none, and no storage "
            f"(agentic: {TierSpec().host_kv_tokens}, else 0)",
        ),
        add(
            "--storage",
            action=argparse.BooleanOptionalAction,
            help="storage below host memory, which all ranks share (with host memory)",
        ),
        add(
            "--block-tokens",
            type=_tokens,
            default=0,
            metavar="TOKENS",
            help="give the paper's scenarios prefix caches with blocks of this size, too; their "
            "prompts share nothing (0: no caches)",
        ),
        add(
            "--prefix-source",
            choices=get_args(PrefixSource),
            default="events",
            help="how sbs and sbs_paper know what a rank has cached: its KV events, what they sent "
            "there, or not at all (events)",
        ),
        add(
            "--load-counts",
            choices=LOAD_COUNTS,
            default="prompt",
            help="what load 1.0 is: full chunks of all prompt tokens, or the most that can be "
            "served if nothing is computed twice and all ranks are equally busy (prompt)",
        ),
    ]


def _add_robustness(parser: argparse.ArgumentParser) -> _Actions:
    """What the scheduler cannot rely on."""
    add = parser.add_argument_group(
        "robustness", "what the scheduler is told wrong, late, twice or not at all"
    ).add_argument
    return [
        add(
            "--burstiness",
            type=positive_number,
            default=1.0,
            metavar="CV",
            help="arrivals with gamma gaps of this coefficient of variation; 1: Poisson, 3: bursts "
            "and lulls, below 1: more even. A trace has its own (1)",
        ),
        add(
            "--length-error",
            type=_share,
            default=0.0,
            metavar="SHARE",
            help="the scheduler is told prompt lengths times a uniform factor, 0.3: 0.7 to 1.3; "
            "the engine computes the true ones, and its EndForward reports say so (0)",
        ),
        add(
            "--endforward-loss",
            type=_share_or_all,
            default=0.0,
            metavar="SHARE",
            help="share of EndForward messages that never arrive; 1: an engine without plugin (0)",
        ),
        add(
            "--endforward-delay-ms",
            type=not_negative,
            default=0.0,
            metavar="MS",
            help="mean of an exponential delay of each message, unknown to the scheduler; "
            "messages of different ranks overtake each other (0)",
        ),
        add(
            "--endforward-duplicates",
            type=_share_or_all,
            default=0.0,
            metavar="SHARE",
            help="share of EndForward messages that arrive twice (0)",
        ),
    ]


def _tiers(args: argparse.Namespace) -> dict[str, Any]:
    """Tiers below the caches, if anything is said of them."""
    has_tiers = getattr(args, "scenario", "") == AGENTIC  # without being told
    if args.host_kv_tokens is None and not (args.storage or (has_tiers and args.storage is False)):
        return {}
    tiers = TierSpec(storage=args.storage is not False)
    if args.host_kv_tokens is not None:
        tiers = msgspec.structs.replace(tiers, host_kv_tokens=args.host_kv_tokens)
    return {"tiers": tiers}


def add_topology(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Flags for how many instances there are, which differ, and what happens to them."""
    add = parser.add_argument_group(
        "instances", "they are called p0, p1, ... in the order of the flags"
    ).add_argument
    return [
        add("--prefill", type=positive, metavar="N", help="equal prefill instances (3)"),
        add(
            "--instance",
            type=_instances,
            action="extend",
            metavar="SPEC",
            help="instead of --prefill, repeated: prefill instances that differ, as in "
            "count=2,dp=8 or dp=4,chunk=4096,speed=0.5. What is left out is --dp, --chunks, 1. "
            "Load 1.0 counts an instance by what its full chunks are worth",
        ),
        add(
            "--at",
            type=_changes,
            default=[],
            metavar="SECOND:ACTION:INSTANCE,...",
            help=f"topology changes, {', '.join(ACTIONS)}, as in 30:drain:p1,50:down:p1,70:up:p1. "
            "drain: no new requests, the old ones end. down: it dies, its requests fail and are "
            "sent again elsewhere. up: it is back; an instance whose first change is up joins then",
        ),
        add(
            "--short-pool",
            type=_tokens,
            default=0,
            metavar="N",
            help="so many instances take short prompts only, the others long ones, with as much to "
            "compute per instance in both (0: all take all)",
        ),
        add(
            "--deflect-tokens",
            type=_tokens,
            default=0,
            metavar="TOKENS",
            help="decode computes prompts of at most so many tokens, too, "
            f"{DEFLECT_CHUNK_TOKENS} per rank and step (0: none)",
        ),
    ]


def cluster_fields(args: argparse.Namespace) -> dict[str, Any]:
    """What :func:`add_cluster` was given, as keywords of ``make_scenario``."""
    return {
        "dp_size": args.dp,
        "page_size": args.page_size,
        "prefill_max_requests": args.prefill_max_requests,
        "captured_tokens": args.captured_tokens,
        "dispatch_latency_s": args.latency_ms / 1e3,
        "dispatch_serial_s": args.serial_ms / 1e3,
        "dispatch_jitter": args.dispatch_jitter,
        "gang_gate_s": args.gang_gate_ms / 1e3,
        "pass_jitter": args.jitter,
        "first_pass_s": args.first_pass_s,
        "launch_gap_s": args.gap_ms / 1e3,
        "overlap": args.overlap,
        "barrier": not args.no_barrier,
        "decode_kv_capacity_tokens": args.decode_kv_tokens,
        "decode_max_running_requests": args.decode_running,
        "decode_s": args.decode_seconds,
        **({"block_tokens": args.block_tokens} if args.block_tokens else {}),
        **({"kv_capacity_tokens": args.kv_tokens} if args.kv_tokens else {"block_tokens": 0}),
        **_tiers(args),
        "prefix_source": args.prefix_source,
        "load_counts": args.load_counts,
        "burstiness": args.burstiness,
        "length_error": args.length_error,
        "endforward_loss": args.endforward_loss,
        "endforward_delay_s": args.endforward_delay_ms / 1e3,
        "endforward_duplicates": args.endforward_duplicates,
    }


def topology_fields(args: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """What :func:`add_topology` was given, as keywords of ``make_scenario``."""
    if args.instance and args.prefill:
        parser.error("--prefill: --instance lists the instances (count=N for several equal ones)")
    instances = len(args.instance or ()) or args.prefill or 3
    if args.short_pool >= instances:
        parser.error(f"--short-pool {args.short_pool}: long prompts need one of {instances}, too")
    if args.short_pool and (args.deflect_tokens or args.at):
        parser.error("--short-pool: leave --deflect-tokens and --at out")
    if args.short_pool and getattr(args, "scenario", "") == AGENTIC:
        parser.error(f"--short-pool: {AGENTIC} is a closed loop, in which lengths are not known")
    fields = {
        "changes": tuple(args.at),
        "short_pool": args.short_pool,
        "deflect_tokens": args.deflect_tokens,
    }
    if args.instance:
        return {"instances": args.instance, **fields}
    return {"prefill_instances": args.prefill or 3, **fields}


def _instances(text: str) -> list[dict[str, float]]:
    """``count=2,dp=8,chunk=3072,speed=0.5``: that many times the fields of an InstanceSpec."""
    count, fields = 1, {}
    for word in text.split(","):
        key, equals, value = word.partition("=")
        if not equals or (key != "count" and key not in _INSTANCE_KEYS):
            raise argparse.ArgumentTypeError(
                f"{word!r}: write count=, {'=, '.join(_INSTANCE_KEYS)}=, as in dp=4,speed=0.5"
            )
        name, parse, expected = _INSTANCE_KEYS.get(key, _COUNT_KEY)
        try:
            number = parse(value)
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{word!r}: write {expected}") from error
        if key == "count":
            count = int(number)
        else:
            fields[name] = number
    return [fields] * count


def _changes(text: str) -> list[TopologyChange]:
    """``30:drain:p1,50:down:p1``, in the order of time."""
    changes = []
    for word in text.split(","):
        second, _, rest = word.partition(":")
        action, _, instance = rest.partition(":")
        if action not in ACTIONS or not instance:
            raise argparse.ArgumentTypeError(
                f"{word!r}: write SECOND:ACTION:INSTANCE with {', '.join(ACTIONS)}, as in "
                "30:drain:p1"
            )
        changes.append(TopologyChange(not_negative(second), cast(Action, action), instance))
    return sorted(changes, key=lambda change: change.at_s)


def _share(text: str) -> float:
    value = not_negative(text)
    if value >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a share below 1, as in 0.3")
    return value


def _share_or_all(text: str) -> float:
    value = not_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r}: write a share between 0 and 1, as in 0.1")
    return value


def _graphs(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: write token counts, as in 512,1024,2048")
    return tuple(sorted(set(map(int, words))))


def _tokens(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write an integer, 0 for unbounded")
    return value
