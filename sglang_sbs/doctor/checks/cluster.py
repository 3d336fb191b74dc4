"""What several engines must have in common: versions, limits of a role, prefill with decode."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence

from sglang_sbs import __version__
from sglang_sbs.doctor.checks.engine import describe_limits
from sglang_sbs.doctor.checks.fields import number, text
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts
from sglang_sbs.doctor.findings import CLUSTER, Finding, finding
from sglang_sbs.engine.install import WIRE_VERSION

_MAX_NAMED = 6
"""Engines named in one finding."""


def check_cluster(facts: ClusterFacts) -> Iterator[Finding]:
    """Everything that needs more than one engine."""
    usable = facts.usable
    prefill, decode = facts.of_role("prefill"), facts.of_role("decode")
    if not prefill or not decode:
        missing = " and ".join(
            role for role, some in (("prefill", prefill), ("decode", decode)) if not some
        )
        yield finding("reach.no-pair", CLUSTER, f"no usable {missing} engine")
    yield from _same_engine(usable)
    yield from _versions(usable)
    for role, engines in (("prefill", prefill), ("decode", decode)):
        yield from _uneven(role, engines)
    if prefill and decode:
        yield from _pairs(prefill, decode)


def _same_engine(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    by_boot: dict[str, list[str]] = {}
    for facts in engines:
        if (sbs := facts.known.sbs) is not None and sbs.boot_id:
            by_boot.setdefault(sbs.boot_id, []).append(facts.url)
    for boot, urls in by_boot.items():
        if len(urls) > 1:
            yield finding(
                "reach.same-engine", CLUSTER, f"{', '.join(urls)} are all boot {boot[:8]}"
            )


def _versions(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    if not engines:
        return
    found: list[Finding] = []
    sglang = grouped(engines, lambda e: e.known.version)
    if len(sglang) > 1:
        found.append(finding("version.mixed", CLUSTER, f"SGLang {told(sglang)}"))
    with_plugin = [e for e in engines if isinstance(e.data.get("sbs"), dict)]
    plugin = grouped(with_plugin, lambda e: text(e.data["sbs"], "sglang_sbs_version") or "?")
    if len(plugin) > 1 or (plugin and __version__ not in plugin):
        seen = f"sglang-sbs {told(plugin)}; this doctor is {__version__}"
        found.append(finding("version.mixed-plugin", CLUSTER, seen))
    wire = grouped(with_plugin, lambda e: str(number(e.data["sbs"], "wire_version")))
    if wire and set(wire) != {str(WIRE_VERSION)}:
        seen = f"EndForward version {told(wire)}; this release reads {WIRE_VERSION}"
        found.append(finding("version.wire", CLUSTER, seen))
    kernel = grouped(
        [e for e in with_plugin if text(e.data["sbs"], "sgl_kernel_version")],
        lambda e: text(e.data["sbs"], "sgl_kernel_version"),
    )
    if len(kernel) > 1:
        found.append(finding("version.mixed-kernel", CLUSTER, f"sgl-kernel {told(kernel)}"))
    yield from found
    if not found:
        seen = f"SGLang {next(iter(sglang)) or '?'}"
        seen += f", sglang-sbs {next(iter(plugin))}" if plugin else ", no plugin seen"
        seen += f", sgl-kernel {next(iter(kernel))}" if kernel else ", sgl-kernel not shown"
        yield finding("version.ok", CLUSTER, seen)


def _uneven(role: str, engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    limits = grouped(engines, lambda e: describe_limits(e.known, prefill=role == "prefill"))
    if len(limits) > 1:
        yield finding("limits.uneven", CLUSTER, f"{role}: {told(limits)}")


def _pairs(prefill: Sequence[EngineFacts], decode: Sequence[EngineFacts]) -> Iterator[Finding]:
    both = [*prefill, *decode]
    found: list[Finding] = []

    def differ(finding_id: str, what: str, value: Callable[[EngineFacts], str]) -> None:
        """Values that prefill and decode must share, where both say one."""
        known = grouped([e for e in both if value(e)], value)
        if len(known) > 1:
            found.append(finding(finding_id, CLUSTER, f"{what} {told(known)}"))

    differ("pair.model", "model", lambda e: e.known.model_id)
    differ("pair.transfer-backend", "transfer backend", _transfer_backend)
    differ("pair.page-size", "page size", lambda e: str(number(e.data, "page_size") or ""))
    differ("pair.kv-dtype", "type of KV cache", _kv_dtype)
    differ(
        "pair.allocation-policy",
        "allocation policy",
        lambda e: text(e.data, "disaggregation_decode_allocation_policy"),
    )
    found += _tensor_parallel(prefill, decode)
    longest = {e.url: e.known.max_request_tokens for e in both}
    prompts = max(longest[e.url] for e in prefill)
    least = min(longest[e.url] for e in decode)
    if 0 < least < prompts:
        seen = f"prompts of up to {prompts} tokens on prefill, of {least} on decode"
        found.append(finding("pair.context", CLUSTER, seen))
    yield from found
    if all(one.id == "pair.tp-differs" for one in found):
        backend = _transfer_backend(prefill[0]) or "not shown"
        seen = f"{len(prefill)} x {len(decode)} pairs, KV transfer {backend}"
        yield finding(
            "pair.ok", CLUSTER, f"{seen}, page size {number(prefill[0].data, 'page_size')}"
        )


def _transfer_backend(facts: EngineFacts) -> str:
    """As on the engine's command line, where that is shown: mooncake_tcp resolves to mooncake."""
    flag = "--disaggregation-transfer-backend"
    try:
        words = shlex.split(text(facts.data, "launch_command"))
    except ValueError:
        words = []
    for index, word in reversed(list(enumerate(words))):
        name, equals, value = word.partition("=")
        if name == flag:
            return value if equals else "".join(words[index + 1 : index + 2])
    return text(facts.data, "disaggregation_transfer_backend")


def _kv_dtype(facts: EngineFacts) -> str:
    """Empty for ``auto``: it depends on the model and is not shown."""
    dtype = text(facts.data, "kv_cache_dtype")
    return "" if dtype == "auto" else dtype


def _tensor_parallel(
    prefill: Sequence[EngineFacts], decode: Sequence[EngineFacts]
) -> Iterator[Finding]:
    sizes = {(attention_tp(p), attention_tp(d)) for p in prefill for d in decode}
    for p, d in sorted(sizes):
        if p < 1 or d < 1 or p == d:
            continue
        seen = f"attention TP size {p} on prefill, {d} on decode"
        divides = p % d == 0 or d % p == 0
        yield finding("pair.tp-differs" if divides else "pair.tp-indivisible", CLUSTER, seen)


def attention_tp(facts: EngineFacts) -> int:
    """TP size within one DP rank; 0 if it is not said."""
    ranks = facts.info.dp_size if facts.info and facts.data.get("enable_dp_attention") else 1
    context_parallel = max(1, number(facts.data, "attn_cp_size"))
    return number(facts.data, "tp_size") // (ranks * context_parallel)


def grouped(
    engines: Sequence[EngineFacts], value: Callable[[EngineFacts], str]
) -> dict[str, list[str]]:
    """URLs by value, in the order of the engines."""
    groups: dict[str, list[str]] = {}
    for facts in engines:
        groups.setdefault(value(facts), []).append(facts.url)
    return groups


def told(groups: dict[str, list[str]]) -> str:
    """``A (url, url) and B (url)``; the value of most engines first."""
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "; ".join(
        f"{value or '?'} ({', '.join(urls[:_MAX_NAMED])}{' …' if len(urls) > _MAX_NAMED else ''})"
        for value, urls in ordered
    )
