"""Is the plugin there, and does every DP rank report?

What a router says of its reports is judged in :mod:`.router`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from sglang_sbs.doctor.checks.cluster import told
from sglang_sbs.doctor.checks.fields import text
from sglang_sbs.doctor.facts import (
    SHOWN_VERSION,
    ClusterFacts,
    EngineFacts,
    Heard,
    RankHeard,
    key_differs,
    may_speak_unseen,
)
from sglang_sbs.doctor.findings import CLUSTER, Finding, finding
from sglang_sbs.router.engines.urls import alias_key, normalise_worker_url
from sglang_sbs.router.workers.diagnosis import why_stranger
from sglang_sbs.router.workers.server_info import (
    PLUGIN_VERSION,
    SbsBlock,
    WorkerInfo,
    node_of_rank,
    parse_version,
)
from sglang_sbs.wire import EndForward

_MAX_SHOWN = 8


def check_endforward(facts: ClusterFacts) -> Iterator[Finding]:
    """Plugin and reports of every engine."""
    usable = facts.usable
    heard = facts.heard or Heard()
    mine = Attribution(usable, heard)
    for engine in usable:
        yield from _plugin(facts, engine, mine)
        yield from _reports(facts, engine, mine)
    yield from _instance_ids(usable)
    for url, report in mine.misnamed.items():
        seen = f"reports of an engine with --dist-init-addr {report.dist_init_addr!r} name this one"
        yield finding("plugin.instance-id", url, seen, None)
    yield from _routers(usable)
    yield from _listening(facts, heard, mine)


class Attribution:
    """Whose reports are whose: by boot id, by instance id, and where only one engine is left."""

    def __init__(self, engines: list[EngineFacts], heard: Heard) -> None:
        self._ranks: dict[str, dict[int, RankHeard]] = {}
        self.mismatched: dict[str, EndForward] = {}
        """A report of each engine whose ranks say something else than the engine."""
        self.misnamed: dict[str, EndForward] = {}
        """A report in the name of each engine that another one sent."""
        self.leftover: list[RankHeard] = []
        """Reports whose engine is not known."""
        by_boot = {
            e.info.sbs.boot_id: e for e in engines if e.info and e.info.sbs and e.info.sbs.boot_id
        }
        by_alias = {alias_key(e.url): e for e in engines}
        rest: list[dict[int, RankHeard]] = []
        for boot, ranks in heard.ranks.items():
            engine = by_boot.get(boot)
            if engine is None:
                first = next(iter(ranks.values())).last
                engine = by_alias.get(_alias(first.instance_id)) if first.instance_id else None
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

    def of(self, engine: EngineFacts) -> dict[int, RankHeard]:
        """What was heard of an engine, by rank."""
        return self._ranks.get(engine.url, {})

    def may_be_among_leftover(self, engine: EngineFacts) -> bool:
        """Whether reports of nobody known could be this engine's."""
        return _may_speak(engine) and any(self._says(engine, heard.last) for heard in self.leftover)

    def _give(self, engine: EngineFacts, ranks: dict[int, RankHeard]) -> None:
        for rank, heard in ranks.items():
            if self._says(engine, heard.last):
                self._ranks.setdefault(engine.url, {})[rank] = heard
            else:
                self.mismatched[engine.url] = heard.last

    def _fits(self, engine: EngineFacts, ranks: dict[int, RankHeard]) -> bool:
        """An engine that lacks these very ranks (a boot id of another node, or one not shown)."""
        return (
            _may_speak(engine)
            and not any(_is_strange(engine, heard.last) for heard in ranks.values())
            and all(self._says(engine, heard.last) for heard in ranks.values())
            and not (ranks.keys() & self.of(engine).keys())
        )

    @staticmethod
    def _says(engine: EngineFacts, report: EndForward) -> bool:
        info = engine.info
        return (
            info is not None
            and report.role == engine.target.role
            and report.dp_size == info.dp_size
        )


def _alias(instance_id: str) -> tuple[str, int]:
    try:
        return alias_key(normalise_worker_url(instance_id))
    except ValueError:
        return "", 0


def _is_strange(engine: EngineFacts, report: EndForward) -> bool:
    return engine.info is not None and bool(why_stranger(engine.info, report))


def _may_speak(engine: EngineFacts) -> bool:
    return _sbs(engine) is not None or may_speak_unseen(engine)


def _sbs(engine: EngineFacts) -> SbsBlock | None:
    return engine.info.sbs if engine.info is not None else None


# The plugin -----------------------------------------------------------------------------------


def _plugin(facts: ClusterFacts, engine: EngineFacts, mine: Attribution) -> Iterator[Finding]:
    sbs, url = _sbs(engine), engine.url
    ranks = mine.of(engine)
    errors = {rank: one.last.hook_errors for rank, one in ranks.items() if one.last.hook_errors}
    if errors:
        shown = ", ".join(f"rank {rank}: {n}" for rank, n in sorted(errors.items())[:_MAX_SHOWN])
        yield finding("plugin.errors", url, f"errors inside the hook: {shown}")
    if sbs is not None:
        speaks = ", ".join(sbs.routers) or (f"listens at {sbs.bind}" if sbs.bind else "nobody")
        if not errors:
            to = speaks if not sbs.routers else f"reports to {speaks}"
            yield finding("plugin.ok", url, f"loaded, {to}")
        return
    if ranks or _router_hears(facts, url) or mine.may_be_among_leftover(engine):
        return
    info = engine.info
    version = parse_version(info.version) if info is not None else None
    if version is not None and (0, 0, 0) < version < PLUGIN_VERSION:
        return  # version.needs-patch says it
    if may_speak_unseen(engine):
        if facts.heard is not None and facts.heard.bound:
            seen = f"no EndForward in {facts.heard.listened_s:.0f} s, and its version shows no more"
            yield finding("plugin.absent", url, seen)
        else:
            yield finding(
                "plugin.unknown",
                url,
                f"SGLang {info.version or '?'} does not show it" if info else "",
            )
        return
    shown_from = ".".join(map(str, SHOWN_VERSION))
    yield finding(
        "plugin.absent", url, f"no sbs block in /server_info (shown from SGLang {shown_from} on)"
    )


def _instance_ids(engines: list[EngineFacts]) -> Iterator[Finding]:
    named = [(e, text(e.data["sbs"], "instance_id")) for e in engines if _sbs(e) is not None]
    named = [(engine, instance) for engine, instance in named if instance]
    times = Counter(instance for _, instance in named)
    for engine, instance in named:
        if times[instance] > 1:
            seen = f"SGLANG_SBS_INSTANCE_ID={instance}, as on {times[instance] - 1} other engines"
            yield finding(
                "plugin.instance-id",
                engine.url,
                seen,
                f"SGLANG_SBS_INSTANCE_ID={engine.url}, or unset it",
            )
        elif _alias(instance) != alias_key(engine.url):
            yield finding(
                "plugin.instance-id-unknown",
                engine.url,
                f"SGLANG_SBS_INSTANCE_ID={instance}",
                f"SGLANG_SBS_INSTANCE_ID={engine.url}, or unset it",
            )


def _routers(engines: list[EngineFacts]) -> Iterator[Finding]:
    groups: dict[str, list[str]] = {}
    for engine in engines:
        sbs = _sbs(engine)
        if sbs is not None and sbs.routers:
            groups.setdefault(", ".join(sorted(sbs.routers)), []).append(engine.url)
    if len(groups) > 1:
        yield finding("plugin.routers-differ", CLUSTER, told(groups))


# Reports --------------------------------------------------------------------------------------


def _router_hears(facts: ClusterFacts, url: str) -> bool:
    """Whether a router says that it gets reports of this engine."""
    workers = facts.router.workers if facts.router is not None else []
    return any(entry.get("url") == url and entry.get("signal") == "endforward" for entry in workers)


def _reports(facts: ClusterFacts, engine: EngineFacts, mine: Attribution) -> Iterator[Finding]:
    """Only what was listened to; a router's word is another matter."""
    info, heard, url = engine.info, facts.heard, engine.url
    if facts.router is None and key_differs(facts.options, engine):
        here = "has a key" if facts.options.key_file is not None else "has none"
        there = "has none" if facts.options.key_file is not None else "has a key"
        seen = f"this side {here}, the engine {there}: not listened to"
        yield finding("endforward.key", url, seen)
        return
    if info is None or heard is None:
        return
    wrong = mine.mismatched.get(url)
    if wrong is not None:
        seen = (
            f"reports say {wrong.role} with {wrong.dp_size} ranks, /server_info says "
            f"{engine.target.role} with {info.dp_size}"
        )
        yield finding("endforward.mismatch", url, seen)
        return
    ranks = mine.of(engine)
    missing = [rank for rank in range(info.dp_size) if rank not in ranks]
    if not missing:
        messages = sum(one.messages for one in ranks.values())
        slowest_us = max(one.last.hook_us for one in ranks.values())
        seen = (
            f"{messages} messages of all {info.dp_size} ranks in {heard.listened_s:.1f} s; a "
            f"message costs the engine {slowest_us} µs"
        )
        yield finding("endforward.ok", url, seen)
        return
    sbs = info.sbs
    if sbs is None and not ranks:
        return  # plugin.absent says it, or nothing can be said
    if sbs is not None and not _listened_to(sbs, heard):
        if not _router_hears(facts, url) and facts.router is None:
            elsewhere = [e for e in sbs.routers if e in heard.elsewhere]
            if elsewhere:
                yield finding("endforward.elsewhere", url, f"reports to {', '.join(elsewhere)}")
        return
    if mine.may_be_among_leftover(engine):
        return  # endforward.unattributed says it
    if not ranks:
        where = ", ".join([*heard.bound, *heard.dialled])
        seen = f"nothing in {heard.listened_s:.0f} s of listening at {where}"
        yield finding("endforward.silent", url, seen)
        return
    seen = (
        f"nothing of {_ranks_and_nodes(info, missing)} in {heard.listened_s:.0f} s, "
        f"{len(ranks)} other ranks report"
    )
    yield finding("endforward.rank-missing", url, seen, _what_to_open(info, missing))


def _ranks_and_nodes(info: WorkerInfo, ranks: list[int]) -> str:
    shown = [
        f"{rank} (node {node_of_rank(info, rank)})" if info.nodes > 1 else str(rank)
        for rank in ranks[:_MAX_SHOWN]
    ]
    return "rank " + ", ".join(shown) + (" …" if len(ranks) > _MAX_SHOWN else "")


def _what_to_open(info: WorkerInfo, missing: list[int]) -> str | None:
    """For ranks on other nodes; ``None``: the catalogue's advice."""
    nodes = sorted({node_of_rank(info, rank) for rank in missing} - {0})
    if not nodes or info.sbs is None:
        return None
    shown = "node " + ", ".join(map(str, nodes[:_MAX_SHOWN])) + ("" if len(nodes) < 9 else " …")
    if not info.sbs.routers:
        return (
            "set SGLANG_SBS_ROUTERS instead of SGLANG_SBS_BIND on every node: the router connects "
            f"to the first node's address only, and not to {shown}"
        )
    return (
        f"let {shown} connect to {', '.join(info.sbs.routers)} (open that port on the way there), "
        "with the plugin and the same SGLANG_SBS_ROUTERS and SGLANG_SBS_KEY_FILE as the first "
        "node; look for 'sglang_sbs' in its log"
    )


def _listened_to(sbs: SbsBlock, heard: Heard) -> bool:
    """Whether this engine would have been heard: one of its endpoints was ours."""
    if sbs.bind and heard.dialled:
        return True
    unheard = {*heard.elsewhere, *heard.busy, *heard.failed}
    return bool(heard.bound) and any(endpoint not in unheard for endpoint in sbs.routers)


def _listening(facts: ClusterFacts, heard: Heard, mine: Attribution) -> Iterator[Finding]:
    for endpoint in heard.busy:
        if facts.router is None:
            yield finding("endforward.port-busy", CLUSTER, f"{endpoint} is taken")
    for endpoint, why in heard.failed.items():
        yield finding("endforward.cannot-listen", CLUSTER, f"{endpoint}: {why}")
    if heard.handshakes_failed:
        key = "with the key given" if facts.options.key_file is not None else "without a key here"
        seen = f"{heard.handshakes_failed} handshakes failed while listening {key}"
        yield finding("endforward.key", CLUSTER, seen)
    if heard.malformed:
        why, times = heard.malformed.most_common(1)[0]
        seen = f"{heard.malformed.total()} messages, {times} of them: {why}"
        yield finding("endforward.malformed", CLUSTER, seen)
    unseen = [e for e in facts.engines if may_speak_unseen(e)]
    for role in ("prefill", "decode"):
        some = [one.last for one in mine.leftover if one.last.role == role]
        if not some:
            continue
        boots = len({report.boot_id for report in some})
        seen = f"{len(some)} {role} ranks of {boots} boots"
        if any(e.target.role == role and e.info is None for e in facts.engines):
            continue  # an engine that could not be asked: these may be its reports
        ours = any(e.target.role == role for e in unseen)
        yield finding("endforward.unattributed" if ours else "endforward.stranger", CLUSTER, seen)
