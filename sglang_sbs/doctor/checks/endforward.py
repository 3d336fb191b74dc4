"""Checks whether the plugin is present and every DP rank reports. The router's view of reports is
judged in :mod:`.router`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang_sbs.doctor.checks.cluster import describe_groups, grouped
from sglang_sbs.doctor.facts import (
    SHOWN_VERSION,
    ClusterFacts,
    EngineFacts,
    RankReports,
    ReceivedReports,
    alias_of,
    key_differs,
    listed,
    may_speak_unseen,
    text,
)
from sglang_sbs.doctor.findings import CLUSTER, Finding, Findings
from sglang_sbs.router.engines.urls import alias_key
from sglang_sbs.router.workers.diagnosis import why_stranger
from sglang_sbs.router.workers.server_info import (
    PLUGIN_VERSION,
    SbsBlock,
    WorkerInfo,
    node_of_rank,
    parse_version,
)
from sglang_sbs.wire import EndForward

finding = Findings("""
ok plugin.ok
warning plugin.absent -> install sglang-sbs next to SGLang (pip install . in a checkout of it), set
    SGLANG_SBS_ROUTERS=tcp://ROUTER:7600, restart (and have sglang_sbs in SGLANG_PLUGINS if that is
    set)
note plugin.unknown -> run the doctor on the router's machine while no router runs, or give --router
warning plugin.routers-differ -> set the same SGLANG_SBS_ROUTERS on all engines; it takes several,
    separated by commas
error plugin.instance-id -> set it to each engine's own URL as given to the router, or unset it
note plugin.instance-id-unknown -> set it to the URL given to the router, or unset it
warning plugin.errors -> look for 'sglang_sbs' in the engine's log and report the error
ok endforward.ok
error endforward.silent -> let SGLANG_SBS_ROUTERS name an address of the router that this engine's
    machine reaches (port 7600 unless --sbs-endforward-bind names another), and let
    SGLANG_SBS_ENDFORWARD_KEY_FILE there and --sbs-endforward-key-file here be the same secret, or
    both unset
error endforward.rank-missing -> give every node of a multi-node engine the plugin and the same
    SGLANG_SBS_ROUTERS; look for 'sglang_sbs' in the log of the missing ranks
warning endforward.stale -> look whether the engine hangs, and at the network between it and the
    router
error endforward.key -> the same file in SGLANG_SBS_ENDFORWARD_KEY_FILE of all engines and
    --sbs-endforward-key-file of the router (openssl rand -hex 32 > FILE), or neither
error endforward.mismatch -> set SGLANG_SBS_INSTANCE_ID to each engine's own URL, or unset it
warning endforward.malformed -> keep the port inside the cluster; use keys
    (--sbs-endforward-key-file)
warning endforward.stranger -> give all engines of the cluster; if they are another cluster's,
    correct SGLANG_SBS_ROUTERS there
note endforward.unattributed -> set SGLANG_SBS_INSTANCE_ID to each engine's URL
note endforward.port-busy -> give --router URL, so that the router is asked what arrives
note endforward.elsewhere -> run the doctor on the router's machine, give --router URL, or give the
    address to listen at: --sbs-endforward-bind tcp://0.0.0.0:7600
warning endforward.cannot-listen -> give another --sbs-endforward-bind
""")


def check(facts: ClusterFacts) -> Iterator[Finding]:
    usable = facts.usable
    received = facts.received or ReceivedReports()
    mine = Attribution(usable, received)
    for engine in usable:
        yield from _plugin(facts, engine, mine)
        yield from _reports(facts, engine, mine)
    yield from _instance_ids(usable)
    for url, report in mine.misnamed.items():
        other = f"engine with --dist-init-addr {report.dist_init_addr!r}"
        seen = f"reports of an {other} name this one"
        change = f"SGLANG_SBS_INSTANCE_ID of the {other}: its own URL, not {url}; or unset it there"
        yield finding("plugin.instance-id", url, seen, change)
    yield from _routers(usable)
    yield from _listening(facts, received, mine)


class Attribution:
    """Assigns reports to engines: by boot id, by instance id, or to the only engine that fits."""

    def __init__(self, engines: list[EngineFacts], received: ReceivedReports) -> None:
        self._ranks: dict[str, dict[int, RankReports]] = {}
        self.mismatched: dict[str, EndForward] = {}
        """Report whose role or number of ranks contradicts ``/server_info``, by engine URL."""
        self.misnamed: dict[str, EndForward] = {}
        """Report that another engine sent under this engine's name, by URL of the named engine."""
        self.leftover: list[RankReports] = []
        """Reports that fit no engine, or several."""
        by_boot = {e.sbs.boot_id: e for e in engines if e.sbs and e.sbs.boot_id}
        by_alias = {alias_key(e.url): e for e in engines}
        rest: list[dict[int, RankReports]] = []
        for boot, ranks in received.ranks.items():
            engine = by_boot.get(boot)
            if engine is None:
                first = next(iter(ranks.values())).last
                alias = alias_of(first.instance_id)
                engine = by_alias.get(alias) if alias is not None else None
                if engine is not None and _is_strange(engine, first):
                    self.misnamed[engine.url] = first
                    engine = None
            if engine is None:
                rest.append(ranks)
            else:
                self._give(engine, ranks)
        for ranks in rest:
            fitting = [engine for engine in engines if self._fits(engine, ranks)]
            if len(fitting) == 1:
                self._give(fitting[0], ranks)
            else:
                self.leftover += ranks.values()

    def of(self, engine: EngineFacts) -> dict[int, RankReports]:
        """Return the reports attributed to an engine, by DP rank."""
        return self._ranks.get(engine.url, {})

    def may_be_among_leftover(self, engine: EngineFacts) -> bool:
        return _may_speak(engine) and any(_says(engine, reports.last) for reports in self.leftover)

    def _give(self, engine: EngineFacts, ranks: dict[int, RankReports]) -> None:
        for rank, reports in ranks.items():
            if _says(engine, reports.last):
                self._ranks.setdefault(engine.url, {})[rank] = reports
            else:
                self.mismatched[engine.url] = reports.last

    def _fits(self, engine: EngineFacts, ranks: dict[int, RankReports]) -> bool:
        """Return whether reports with an unknown boot id may be from an engine. The boot ids of its
        other nodes are unknown, and before SGLang 0.5.22 all are. The reports must not contradict
        the engine, and their ranks must have no other report."""
        return (
            _may_speak(engine)
            and not any(_is_strange(engine, reports.last) for reports in ranks.values())
            and all(_says(engine, reports.last) for reports in ranks.values())
            and not (ranks.keys() & self.of(engine).keys())
        )


def _says(engine: EngineFacts, report: EndForward) -> bool:
    return (engine.role, engine.known.dp_size) == (report.role, report.dp_size)


def _is_strange(engine: EngineFacts, report: EndForward) -> bool:
    return bool(why_stranger(engine.known, report))


def _may_speak(engine: EngineFacts) -> bool:
    return engine.sbs is not None or may_speak_unseen(engine)


# The plugin -----------------------------------------------------------------------------------


def _plugin(facts: ClusterFacts, engine: EngineFacts, mine: Attribution) -> Iterator[Finding]:
    sbs, url, info = engine.sbs, engine.url, engine.known
    ranks = mine.of(engine)
    errors = {
        rank: reports.last.hook_errors
        for rank, reports in ranks.items()
        if reports.last.hook_errors
    }
    if errors:
        shown = listed(f"rank {rank}: {n}" for rank, n in sorted(errors.items()))
        yield finding("plugin.errors", url, f"errors inside the hook: {shown}")
    if sbs is not None and not errors:
        to = f"listens at {sbs.bind}" if sbs.bind else "reports to no router"
        to = f"reports to {', '.join(sbs.routers)}" if sbs.routers else to
        yield finding("plugin.ok", url, f"loaded, {to}")
    if sbs is not None or ranks or _router_hears(facts, url) or mine.may_be_among_leftover(engine):
        return
    version = parse_version(info.version)
    if version is not None and (0, 0, 0) < version < PLUGIN_VERSION:
        return  # reported by version.needs-patch
    if not may_speak_unseen(engine):
        shown_from = ".".join(map(str, SHOWN_VERSION))
        seen = f"no sbs block in /server_info (shown from SGLang {shown_from} on)"
        yield finding("plugin.absent", url, seen)
    elif facts.received is not None and facts.received.bound:
        seen = f"no EndForward in {facts.received.listened_s:.0f} s, and its version shows no more"
        yield finding("plugin.absent", url, seen)
    else:
        yield finding("plugin.unknown", url, f"SGLang {info.version or '?'} does not show it")


def _instance_ids(engines: list[EngineFacts]) -> Iterator[Finding]:
    named = {e.url: name for e in engines if e.sbs and (name := text(e.plugin, "instance_id"))}
    times = Counter(named.values())
    for url, name in named.items():
        seen = f"SGLANG_SBS_INSTANCE_ID={name}"
        change = f"SGLANG_SBS_INSTANCE_ID={url}, or unset it"
        if times[name] > 1:
            seen += f", as on {times[name] - 1} other engines"
            yield finding("plugin.instance-id", url, seen, change)
        elif alias_of(name) != alias_key(url):
            yield finding("plugin.instance-id-unknown", url, seen, change)


def _routers(engines: list[EngineFacts]) -> Iterator[Finding]:
    speaking = [e for e in engines if e.sbs is not None and e.sbs.routers]
    groups = grouped(speaking, lambda e: ", ".join(sorted(e.sbs.routers)) if e.sbs else "")
    if len(groups) > 1:
        yield finding("plugin.routers-differ", CLUSTER, describe_groups(groups))


# Reports --------------------------------------------------------------------------------------


def _router_hears(facts: ClusterFacts, url: str) -> bool:
    router = facts.router
    return router is not None and router.entry(url).get("signal") == "endforward"


def _reports(facts: ClusterFacts, engine: EngineFacts, mine: Attribution) -> Iterator[Finding]:
    """Judge the messages received by the doctor. Reports at the router are judged in
    :mod:`.router`."""
    info, received, url, sbs = engine.known, facts.received, engine.url, engine.sbs
    if facts.router is None and key_differs(facts.options, engine):
        has, lacks = "has a key", "has none"
        here, there = (has, lacks) if facts.options.key_file is not None else (lacks, has)
        seen = f"this side {here}, the engine {there}: not listened to"
        yield finding("endforward.key", url, seen)
        return
    if received is None:
        return
    ranks = mine.of(engine)
    missing = [rank for rank in range(info.dp_size) if rank not in ranks]
    if (wrong := mine.mismatched.get(url)) is not None:
        seen = f"reports are of a {wrong.role} engine with {wrong.dp_size} ranks, /server_info is "
        seen += f"of a {engine.role} engine with {info.dp_size}"
        yield finding("endforward.mismatch", url, seen)
    elif not missing:
        messages = sum(reports.messages for reports in ranks.values())
        slowest_us = max(reports.last.hook_us for reports in ranks.values())
        seen = f"{messages} messages of all {info.dp_size} ranks in {received.listened_s:.1f} s; a "
        seen += f"message costs the engine {slowest_us} µs"
        yield finding("endforward.ok", url, seen)
    elif sbs is None and not ranks:
        pass  # reported by plugin.absent, or unknown
    elif sbs is not None and not _listened_to(sbs, received):
        elsewhere = [e for e in sbs.routers if e in received.elsewhere]
        if elsewhere and facts.router is None:
            yield finding("endforward.elsewhere", url, f"reports to {', '.join(elsewhere)}")
    elif mine.may_be_among_leftover(engine):
        pass  # reported by endforward.unattributed
    elif not ranks:
        where = ", ".join([*received.bound, *received.dialled])
        seen = f"nothing in {received.listened_s:.0f} s of listening at {where}"
        yield finding("endforward.silent", url, seen)
    else:
        nodes = {rank: f" (node {node_of_rank(info, rank)})" for rank in missing if info.nodes > 1}
        shown = listed(f"{rank}{nodes.get(rank, '')}" for rank in missing)
        seen = f"nothing of rank {shown} in {received.listened_s:.0f} s, "
        seen += f"{len(ranks)} other ranks report"
        yield finding("endforward.rank-missing", url, seen, _what_to_open(info, missing))


def _what_to_open(info: WorkerInfo, missing: list[int]) -> str | None:
    """Advice about ports for ranks on other nodes; ``None``: the default advice."""
    nodes = sorted({node_of_rank(info, rank) for rank in missing} - {0})
    if not nodes or info.sbs is None:
        return None
    shown = f"node {listed(nodes)}"
    if not info.sbs.routers:
        return (
            "set SGLANG_SBS_ROUTERS instead of SGLANG_SBS_BIND on every node: the router connects "
            f"to the first node's address only, and not to {shown}"
        )
    return (
        f"let {shown} connect to {', '.join(info.sbs.routers)} (open that port on the way there), "
        "with the plugin and the same SGLANG_SBS_ROUTERS and SGLANG_SBS_ENDFORWARD_KEY_FILE as the "
        "first node; look for 'sglang_sbs' in its log"
    )


def _listened_to(sbs: SbsBlock, received: ReceivedReports) -> bool:
    """Return whether reports of this engine could arrive, i.e. the doctor listened at one of its
    endpoints or connected to it."""
    if sbs.bind and received.dialled:
        return True
    unbound = {*received.elsewhere, *received.busy, *received.failed}
    return bool(received.bound) and any(endpoint not in unbound for endpoint in sbs.routers)


def _listening(
    facts: ClusterFacts, received: ReceivedReports, mine: Attribution
) -> Iterator[Finding]:
    for endpoint in received.busy if facts.router is None else ():
        yield finding("endforward.port-busy", CLUSTER, f"{endpoint} is taken")
    for endpoint, why in received.failed.items():
        yield finding("endforward.cannot-listen", CLUSTER, f"{endpoint}: {why}")
    if received.handshakes_failed:
        key = "with the key given" if facts.options.key_file is not None else "without a key here"
        seen = f"{received.handshakes_failed} handshakes failed while listening {key}"
        yield finding("endforward.key", CLUSTER, seen)
    if received.malformed:
        why, times = received.malformed.most_common(1)[0]
        seen = f"{received.malformed.total()} messages, {times} of them: {why}"
        yield finding("endforward.malformed", CLUSTER, seen)
    for role in ("prefill", "decode"):
        some = [reports.last for reports in mine.leftover if reports.last.role == role]
        mates = [e for e in facts.engines if e.role == role]
        if some and not any(e.info is None for e in mates):  # otherwise these may be its reports
            seen = f"{len(some)} {role} ranks of {len({report.boot_id for report in some})} boots"
            kind = "unattributed" if any(map(may_speak_unseen, mates)) else "stranger"
            yield finding(f"endforward.{kind}", CLUSTER, seen)
