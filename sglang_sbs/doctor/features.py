"""The features of a deployment: which are on, why, and what to change (``doctor --features``).
There is one function per row, in order. ``docs/features.md`` explains each feature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from sglang_sbs.doctor.checks import prefill, security
from sglang_sbs.doctor.checks.cluster import attention_tp
from sglang_sbs.doctor.checks.endforward import Attribution
from sglang_sbs.doctor.facts import (
    ClusterFacts,
    EngineFacts,
    RouterFacts,
    in_ms,
    listed,
    number,
    objects,
    text,
)
from sglang_sbs.router.workers.boot_identity import SILENT_AFTER_S
from sglang_sbs.router.workers.diagnosis import barrier_of
from sglang_sbs.router.workers.server_info import parse_version

_GATHERING_VERSION = (0, 5, 22)
"""First release whose DP ranks gather enough numbers for the words of ``engine/gang_gather.py``."""
_GATE_VERSION = (0, 5, 11)
"""First release with a gate. The patch for earlier releases does not include it."""
_CHATS_DIFFER = "other token ids for chat than"
"""The problem reported by ``router/prompts/tokenizer_check.py`` for an engine that tokenizes texts
like the router, but not chats."""


class State(StrEnum):
    """State of a feature. ``partly``: on some engines or ranks, or with limitations."""

    ON = "on"
    PARTLY = "partly"
    OFF = "off"
    UNKNOWN = "unknown"


class Seen(NamedTuple):
    """State of a feature, with the reason. ``change``: what to change; empty: nothing; ``None``:
    the feature's own advice, unless it is on."""

    state: State
    why: str
    change: str | None = None


class _Unreported(Exception):
    """Raised by a row whose state depends on flags that no router reported."""


class FeatureView:
    """The gathered facts as the functions below need them; responses may contain anything.

    ``options`` are the effects of flags: those of the running router if one was asked, otherwise
    those of the given command line."""

    def __init__(self, facts: ClusterFacts) -> None:
        self.facts = facts
        self.prefill = facts.of_role("prefill")
        self.decode = facts.of_role("decode")
        self.engines = [*self.prefill, *self.decode]
        self.router = router = facts.router or RouterFacts("")
        self.asked = router.failure is None and bool(router.state)
        """True: a running router of this project responded."""
        self.state = router.state
        self.options: dict[str, Any] = (
            facts.options.router_flags.shown() if facts.router is None else router.options
        )

    @property
    def required_options(self) -> dict[str, Any]:
        """Return ``options``, for rows that depend on them. Raises: _Unreported, no router reported
        them."""
        if not self.options:
            raise _Unreported
        return self.options

    @property
    def policy(self) -> str:
        """Return the router's policy. Raises: _Unreported, no router reported it."""
        policy = text(self.state, "policy") or text(self.required_options, "policy")
        if not policy:
            raise _Unreported
        return policy

    def problem(self, engine: EngineFacts, kind: str) -> str:
        """Return the router's text about its problem of this kind with an engine; empty without
        one."""
        return text(self.router.problems(engine.url), kind)

    def silent_ranks(self, engine: EngineFacts) -> list[int] | None:
        """Return the engine's DP ranks from which no EndForward reached the router (or the doctor,
        if no router responded); None: not known."""
        reporting: set[int]
        if self.asked:
            ages_s = self.router.ages_s(engine.url)
            reporting = {
                n for n, age_s in ages_s.items() if age_s is not None and age_s < SILENT_AFTER_S
            }
        elif self.facts.received is not None and self.facts.router is None:
            reporting = set(Attribution(self.engines, self.facts.received).of(engine))
        else:
            return None
        return [rank for rank in range(engine.known.dp_size) if rank not in reporting]


Decide = Callable[[FeatureView], Seen]


class Feature(NamedTuple):
    id: str
    title: str
    turn_on: str
    """How to turn it on: flag or variable, and where to set it, e.g. ``--policy sbs (router)``."""
    decide: Decide


@dataclass(frozen=True, slots=True)
class FeatureRow:
    id: str
    title: str
    state: State
    why: str
    change: str


FEATURES: list[Feature] = []


def feature_rows(facts: ClusterFacts) -> list[FeatureRow]:
    """Return all features in the order of :data:`FEATURES`."""
    view = FeatureView(facts)
    rows = []
    for feature in FEATURES:
        try:
            state, why, change = feature.decide(view)
        except _Unreported:
            state, why, change = _UNREPORTED if view.asked else _UNANSWERED
        advice = "" if state is State.ON else feature.turn_on
        rows.append(
            FeatureRow(feature.id, feature.title, state, why, advice if change is None else change)
        )
    return rows


def _feature(title: str, turn_on: str) -> Callable[[Decide], Decide]:
    """Decorator that makes a function a row of the table."""

    def add(decide: Decide) -> Decide:
        FEATURES.append(Feature(decide.__name__.replace("_", "-"), title, turn_on, decide))
        return decide

    return add


_UNREPORTED = Seen(
    State.UNKNOWN, "this router does not report it", "update sglang-sbs on the router"
)
_UNANSWERED = Seen(State.UNKNOWN, "the router did not answer", "see sglang-sbs doctor")
_NO_ENGINE = Seen(State.UNKNOWN, "no such engine could be asked", "see sglang-sbs doctor")


def _over(engines: Sequence[EngineFacts], fault: Callable[[EngineFacts], str], on: str) -> Seen:
    """Return the state of a feature over several engines: on if no engine has a fault, off if all
    have one, and partly otherwise. ``fault``: returns an engine's fault, empty if none; ``on``:
    reason shown for on."""
    if not engines:
        return _NO_ENGINE
    faults = {engine.url: found for engine in engines if (found := fault(engine))}
    if not faults:
        return Seen(State.ON, on)
    url, found = next(iter(faults.items()))
    if len(faults) < len(engines):
        return Seen(State.PARTLY, f"{len(faults)} of {len(engines)} engines: {url}: {found}")
    return Seen(State.OFF, f"{url}: {found}" if len(engines) == 1 else f"on every engine: {found}")


@_feature("Batches held at the router", "--policy sbs (router)")
def batches(view: FeatureView) -> Seen:
    if view.policy != "sbs":
        return Seen(State.OFF, f"--policy {view.policy} places every request at once")
    trigger = text(view.state, "trigger") or text(view.options, "trigger")
    sent = f", {number(view.state, 'batches')} batches so far" if view.asked else ""
    return Seen(State.ON, f"--policy sbs, trigger {trigger}{sent}")


_SOURCES = {
    "endforward": "EndForward",
    "load_poll": "/v1/loads",
    "http": "answers of requests",
    "interval": "own dispatches",
    "none": "own dispatches",
}


def _load_sources(view: FeatureView) -> list[str]:
    """Return the sources from which the router gets the loads of ranks."""
    decode = view.router.instances("decode")
    found = {text(prefill, "tier") for prefill in view.router.instances("prefill")}
    found |= {text(rank, "source") for each in decode for rank in objects(each.get("ranks"))}
    return [*dict.fromkeys(words for name, words in _SOURCES.items() if name in found)]


@_feature(
    "EndForward push",
    "install sglang-sbs beside SGLang on every node and set SGLANG_SBS_ROUTERS there",
)
def endforward(view: FeatureView) -> Seen:
    ranks = {engine.url: view.silent_ranks(engine) for engine in view.engines}
    if not ranks:
        return _NO_ENGINE
    if any(silent is None for silent in ranks.values()):
        return Seen(State.UNKNOWN, "this doctor did not listen", "give --router URL")
    every = sum(engine.known.dp_size for engine in view.engines)
    silent = {url: some for url, some in ranks.items() if some}
    missing = sum(map(len, silent.values()))
    counted = f"{every - missing} of {every} ranks in {len(ranks)} engines"
    if sources := _load_sources(view):
        counted += f", loads by {' and '.join(sources)}"
    if not silent:
        return Seen(State.ON, counted)
    url, some = next(iter(silent.items()))
    state = State.OFF if missing == every else State.PARTLY
    return Seen(state, f"{counted}; {url}: nothing of rank {listed(some)}")


@_feature(
    "EndForward encrypted",
    "the same file as --sbs-endforward-key-file (router) and SGLANG_SBS_ENDFORWARD_KEY_FILE "
    "(engines)",
)
def endforward_key(view: FeatureView) -> Seen:
    if view.required_options.get("endforward_encrypted") is not True:
        return Seen(State.OFF, "the router takes EndForward in the clear")
    return _over(
        view.engines,
        lambda engine: "" if engine.plugin.get("encrypted") is True else "it has no key",
        "router and engines have a key",
    )


@_feature(
    "Batch gate",
    "the plugin on every node of the prefill engines named; SGLANG_SBS_GANG_GATE_MS unset, or the "
    "same on all nodes; SGLang 0.5.22 or newer where there are several",
)
def gang_gate(view: FeatureView) -> Seen:
    if view.policy != "sbs":
        return Seen(State.OFF, f"--policy {view.policy} sends no batches", "--policy sbs")
    enabled = view.required_options.get("gang_gate")
    if not isinstance(enabled, bool):
        raise _Unreported
    if not enabled:
        return Seen(State.OFF, "--sbs-gang-gate off", "--sbs-gang-gate on (router)")
    seen = _over(view.prefill, _gate_fault, "a pass starts all requests of a batch or none")
    for engine in view.prefill if seen.state is State.ON else ():
        if half := view.problem(engine, "gang_gate") or _half_a_gate(engine):
            return Seen(State.PARTLY, f"{engine.url}: {half}")
    return seen


def _half_a_gate(engine: EngineFacts) -> str:
    processes, nodes = attention_tp(engine), max(1, number(engine.data, "nnodes"))
    if processes > 1 and number(engine.data, "tp_size") // nodes % processes:
        return "a DP rank is on several nodes: its first process goes by its own handshakes"
    return ""


def _gate_fault(engine: EngineFacts) -> str:
    """Return why this engine's batch gate is off, by the rules of ``engine/gang_hold.py``; empty if
    it is on."""
    if not engine.plugin:
        return "no plugin"
    if engine.plugin.get("gang_gate_ms") == 0:
        return "SGLANG_SBS_GANG_GATE_MS=0"
    if number(engine.data, "pp_size") > 1:
        return "pipeline parallelism"
    info = engine.known
    alone = number(engine.data, "nnodes") < 2 or info.dp_size == 1 or info.no_barrier
    version = parse_version(info.version)
    if version is None or version == (0, 0, 0):  # source builds report this version
        return ""
    if version < _GATE_VERSION:
        return f"SGLang {info.version}; 0.5.11 is the first with a gate"
    if not alone and version < _GATHERING_VERSION:
        return f"SGLang {info.version} on several nodes; 0.5.22 is the first with a gate there"
    return ""


@_feature("Cache contents", prefill.finding["cache.approximate"].change)
def cache(view: FeatureView) -> Seen:
    source = text(view.options, "prefix_source")
    if source == "off":
        return Seen(State.OFF, "--sbs-prefix-source off", "--sbs-prefix-source auto (router)")

    def off(engine: EngineFacts) -> str:
        return "" if engine.known.radix_cache else "--disable-radix-cache"

    def inexact(engine: EngineFacts) -> str:
        if engine.known.kv_events is None:
            return "no KV events"
        if engine.closed_kv_ports:
            return f"port {engine.closed_kv_ports[0]} of its KV events is shut"
        received = view.router.entry(engine.url).get("kv_events")
        return "the router does not get its KV events" if received is False else ""

    cached = _over(view.prefill, off, "")
    if cached.state is not State.ON:
        return cached
    if source == "approximate":
        return Seen(State.PARTLY, "approximate: --sbs-prefix-source approximate")
    exact = _over(view.prefill, inexact, "exact: KV events of every prefill engine")
    if exact.state is State.ON:
        return exact
    return Seen(State.PARTLY, f"approximate, {exact.why}")


@_feature("Token ids forwarded", "--tokenizer-path DIRECTORY (router)")
def token_ids(view: FeatureView) -> Seen:
    if view.required_options.get("tokenizer") is not True:
        return Seen(State.OFF, "no --tokenizer-path: lengths of text prompts are estimates")
    if text(view.options, "forward_token_ids") == "off":
        why = "exact lengths, but --sbs-forward-token-ids off: engines tokenize again"
        return Seen(State.PARTLY, why, "--sbs-forward-token-ids auto (router)")
    on = "engines get ids" if view.asked else "where a running router finds the same tokenizer"
    chats_only = [_CHATS_DIFFER in view.problem(engine, "tokenizer") for engine in view.engines]

    def fault(engine: EngineFacts) -> str:
        problem = view.problem(engine, "tokenizer")
        if _CHATS_DIFFER in problem:
            return "chats differ there"
        return "its tokenizer differs" if problem else ""

    seen = _over(view.engines, fault, f"exact lengths; {on}")
    if seen.state not in (State.PARTLY, State.OFF):
        return seen
    state = State.PARTLY if any(chats_only) else seen.state
    change = "the engines' own model folder as --tokenizer-path, their template as --chat-template"
    return Seen(state, seen.why, change)


@_feature(
    "Priority classes",
    "--policy sbs, and the same --schedule-low-priority-values-first on router and engines",
)
def priority(view: FeatureView) -> Seen:
    if view.policy != "sbs":
        return Seen(State.OFF, f"--policy {view.policy} holds no requests to put in order")
    low_first = view.options.get("low_priority_values_first") is True

    def fault(engine: EngineFacts) -> str:
        orders = engine.data.get("enable_priority_scheduling") is True
        own = engine.data.get("schedule_low_priority_values_first") is True
        differs = orders and own != low_first
        return "its --schedule-low-priority-values-first is not the router's" if differs else ""

    tenants = ", tenants take turns" if view.options.get("tenants") is True else ""
    seen = _over(view.prefill, fault, f"classes by priority and SLO{tenants}")
    return Seen(State.PARTLY, seen.why) if seen.state is State.OFF else seen


@_feature("Interval learned", "nothing to set: send requests, and see the row endforward")
def interval(view: FeatureView) -> Seen:
    if view.policy != "sbs":
        return Seen(State.OFF, f"--policy {view.policy} has no interval", "--policy sbs")
    if not view.asked:
        return Seen(State.UNKNOWN, "only a running router knows", "give --router URL")
    instances = view.router.instances("prefill")
    waiting = [text(i, "instance") for i in instances if number(i, "passes") < 1]
    if not instances or len(waiting) == len(instances):
        return Seen(State.OFF, "no pass has ended yet: --sbs-t-default-ms stands in")
    if waiting:
        return Seen(State.PARTLY, f"no pass of {waiting[0]} has ended yet")
    names = {"interval_s": "I_opt", "mean_forward_s": "mean pass", "latency_s": "L_net"}
    shown = (f"{name} {in_ms(view.state.get(field))}" for field, name in names.items())
    return Seen(State.ON, ", ".join(shown))


@_feature("Aborts on both legs", security.finding["security.admin-key"].change)
def aborts(view: FeatureView) -> Seen:
    fitting = ("", view.facts.options.router_flags.worker_key)

    def fault(engine: EngineFacts) -> str:
        fits = engine.admin_api_key in fitting
        return "" if fits else "it has an admin key, and none or another is given here"

    return _over(view.engines, fault, "/abort_request of both sides is open to the router")


@_feature("Decode limits kept", "SGLang 0.5.14 or later on decode engines")
def decode_caps(view: FeatureView) -> Seen:
    def fault(engine: EngineFacts) -> str:
        if not engine.known.kv_capacity_tokens:
            return "it does not report the KV tokens per rank"
        return "" if engine.known.max_running_requests else "it does not report its request limit"

    infos = [engine.known for engine in view.decode]
    least = min(infos, key=lambda info: info.kv_capacity_tokens, default=None)
    limits = least and f"{least.kv_capacity_tokens} tokens, {least.max_running_requests} requests"
    return _over(view.decode, fault, f"per rank {limits} at most")


@_feature(
    "Requests per pass",
    "--prefill-max-requests (engine), if passes of many short prompts are to be bounded",
)
def pass_limit(view: FeatureView) -> Seen:
    limits = {e.url: n for e in view.prefill if (n := number(e.data, "prefill_max_requests")) > 0}
    if not view.prefill:
        return _NO_ENGINE
    if not limits:
        return Seen(State.OFF, "no prefill engine has --prefill-max-requests", "")
    limit = min(limits.values())
    kept = [e for e in view.prefill if number(view.router.entry(e.url), "prefill_max_requests") > 0]
    if len(kept) >= len(limits):
        return Seen(State.ON, f"{limit} requests per pass at most, and batches keep to it")
    why = f"engines take {limit} requests per pass at most; batches are packed by tokens"
    return Seen(State.PARTLY, why, "leave --prefill-max-requests out (engine)")


@_feature("Several nodes", "the plugin and the same SGLANG_SBS_ROUTERS on every node")
def nodes(view: FeatureView) -> Seen:
    most = max((number(engine.data, "nnodes") for engine in view.engines), default=0)
    several = [engine for engine in view.engines if number(engine.data, "nnodes") > 1]
    if most < 1:
        return Seen(State.UNKNOWN, "no engine reports its number of nodes", "")
    if not several:
        return Seen(State.OFF, "every engine is on one node", "")
    if any(view.silent_ranks(engine) is None for engine in several):
        return Seen(State.UNKNOWN, "this doctor did not listen to their ranks", "give --router URL")

    def fault(engine: EngineFacts) -> str:
        silent = view.silent_ranks(engine) or []
        return f"{len(silent)} ranks do not report" if silent else ""

    return _over(several, fault, f"{len(several)} engines on {most} nodes; all their ranks report")


@_feature("Rust server", "SGLANG_RUST_SERVER=1 (engine)")
def rust_server(view: FeatureView) -> Seen:
    reported = {engine.known.rust_server for engine in view.engines}
    if reported == {True}:
        return Seen(State.ON, "engines serve HTTP from Rust, one address per DP rank")
    if reported == {False}:
        return Seen(State.OFF, "engines serve HTTP from Python", "")
    return Seen(State.PARTLY, "some engines serve HTTP from Rust", "") if reported else _NO_ENGINE


@_feature(
    "Barrier between ranks",
    "several DP ranks by DP attention (--attn-dp-size), no --dwdp-size and no "
    "SGLANG_SCHEDULER_SKIP_ALL_GATHER (prefill engines)",
)
def barrier(view: FeatureView) -> Seen:
    def fault(engine: EngineFacts) -> str:
        if engine.known.dp_size < 2:
            return "it has one DP rank"
        entry = view.router.entry(engine.url)
        if not engine.known.no_barrier and entry.get("barrier") is False:
            return f"none, by {text(entry, 'barrier_source') or 'the router'}"
        return engine.known.no_barrier

    sources = sorted({barrier_of(engine.known).source for engine in view.prefill})
    return _over(
        view.prefill,
        fault,
        f"all ranks of a prefill engine run a pass together, by {' and '.join(sources)}",
    )


@_feature("Several front ends", "--frontends N (router)")
def front_ends(view: FeatureView) -> Seen:
    processes = number(view.required_options, "front_ends")
    if text(view.options, "role") == "front-end":
        return Seen(State.ON, "this front end relays; a process of its own schedules")
    if processes > 1:
        return Seen(State.ON, f"--frontends {processes}")
    return Seen(State.OFF, "one process relays and schedules")


@_feature("Second router", "SGLANG_SBS_ROUTERS=tcp://A:7600,tcp://B:7600 (engines)")
def standby(view: FeatureView) -> Seen:
    def fault(engine: EngineFacts) -> str:
        if engine.sbs is None:
            return "the plugin does not show where it reports to"
        if len(engine.sbs.routers) < 2:
            return "reports to one router (a name may stand for several)"
        return ""

    return _over(view.engines, fault, "every pass is reported to more than one router")
