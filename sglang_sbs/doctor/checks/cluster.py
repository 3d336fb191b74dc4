"""Compares engines: versions, limits within a role, prefill with decode."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from sglang_sbs import __version__
from sglang_sbs.cluster.flag_words import text_flag
from sglang_sbs.doctor.checks.engine import describe_limits
from sglang_sbs.doctor.facts import ClusterFacts, EngineFacts, listed, number, text
from sglang_sbs.doctor.findings import CLUSTER, Finding, Findings
from sglang_sbs.engine.install import WIRE_VERSION
from sglang_sbs.router.workers.server_info import dp_ranks, may_rebootstrap

finding = Findings("""
error reach.same-engine -> give every engine once
error reach.no-pair -> give at least one working --prefill and one working --decode
ok version.ok
warning version.mixed -> run one release everywhere
note version.kv-acks -> upgrade prefill engines as well
warning version.mixed-plugin -> install the same sglang-sbs on all engines and routers
error version.wire -> install the same sglang-sbs on engines and routers
warning version.mixed-kernel -> pip install the same sgl-kernel on all engines
warning limits.uneven -> start all instances of a role with the same flags
ok pair.ok
error pair.model -> start all engines of a cluster with the same --model-path and
    --served-model-name
error pair.transfer-backend -> the same --disaggregation-transfer-backend on prefill and decode
error pair.page-size -> the same --page-size on prefill and decode
error pair.kv-dtype -> the same --kv-cache-dtype on prefill and decode
error pair.allocation-policy -> the same --disaggregation-decode-allocation-policy on prefill and
    decode
error pair.tp-indivisible -> choose --tp and --attn-dp-size so that one side's attention TP size,
    the first over the second, divides the other's
note pair.tp-differs -> with models without MLA choose the same attention TP size (--tp over
    --attn-dp-size) on both sides
warning pair.context -> the same --context-length on both sides, and enough KV memory on decode
warning pair.retraction-key -> keep decode from retracting (more KV memory, or a smaller
    --max-running-requests there), or start prefill without --api-key and TLS in a network
    that only the router and decode can reach
note pair.cache-report -> start decode engines with --enable-cache-report
ok probe.ok
error probe.failed -> look at the first error in the logs of both engines; the message names the
    side
""")

_ABOUT_EQUAL = 0.95
"""Share of the largest limit of a role from which a limit counts as equal."""


def check(facts: ClusterFacts) -> Iterator[Finding]:
    sides = {"prefill": facts.of_role("prefill"), "decode": facts.of_role("decode")}
    missing = [role for role, engines in sides.items() if not engines]
    if missing:
        yield finding("reach.no-pair", CLUSTER, f"no usable {' and '.join(missing)} engine")
    yield from _same_engine(facts.usable)
    yield from _versions(facts.usable)
    for role, engines in sides.items():
        limits = grouped(engines, partial(_limits, engines))
        if len(limits) > 1:
            yield finding("limits.uneven", CLUSTER, f"{role}: {describe_groups(limits)}")
    if not missing:
        yield from _pairs(**sides)
    for probe in facts.probes:
        seen = probe.failure or f"one token in {probe.took_s:.2f} s"
        name = "probe.failed" if probe.failure else "probe.ok"
        yield finding(name, probe.pair, f"{probe.ranks}: {seen}")


def _limits(engines: Sequence[EngineFacts], facts: EngineFacts) -> str:
    """Describe an engine's limits like those of ``engines`` where the difference is small. SGLang
    derives both limits from the memory that is free at the start, so they differ between engines
    with the same flags (``kv_cache_configurator.py``)."""

    def rounded(name: str) -> int:
        own: int = getattr(facts.known, name)
        most: int = max(getattr(e.known, name) for e in engines)
        return most if own >= _ABOUT_EQUAL * most else own

    derived = ("kv_capacity_tokens", "max_running_requests")
    info = msgspec.structs.replace(facts.known, **{name: rounded(name) for name in derived})
    return describe_limits(info, facts.role)


def _same_engine(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    by_boot = grouped(engines, lambda e: e.sbs.boot_id if e.sbs is not None else "")
    for boot, urls in by_boot.items():
        if boot and len(urls) > 1:
            seen = f"{', '.join(urls)} are all boot {boot[:8]}"
            yield finding("reach.same-engine", CLUSTER, seen)


def _versions(engines: Sequence[EngineFacts]) -> Iterator[Finding]:
    if not engines:
        return
    found: list[Finding] = []
    sglang = grouped(engines, lambda e: e.known.version)
    if len(sglang) > 1:
        found.append(finding("version.mixed", CLUSTER, f"SGLang {describe_groups(sglang)}"))
    old = [e for e in engines if e.role == "prefill" and not e.known.acks_release]
    if old and any(e.role == "decode" and e.known.defers_release for e in engines):
        seen = f"SGLang {describe_groups(grouped(old, lambda e: e.known.version))} on prefill"
        found.append(finding("version.kv-acks", CLUSTER, seen))
    with_plugin = [e for e in engines if isinstance(e.data.get("sbs"), dict)]
    plugin = grouped(with_plugin, lambda e: text(e.plugin, "sglang_sbs_version") or "?")
    if len(plugin) > 1 or (plugin and __version__ not in plugin):
        seen = f"sglang-sbs {describe_groups(plugin)}; this doctor is {__version__}"
        found.append(finding("version.mixed-plugin", CLUSTER, seen))
    wire = grouped(with_plugin, lambda e: str(number(e.plugin, "wire_version")))
    if wire and set(wire) != {str(WIRE_VERSION)}:
        seen = f"EndForward version {describe_groups(wire)}; this release reads {WIRE_VERSION}"
        found.append(finding("version.wire", CLUSTER, seen))
    kernel = grouped(with_plugin, lambda e: text(e.plugin, "sgl_kernel_version"))
    kernel.pop("", None)
    if len(kernel) > 1:
        found.append(
            finding("version.mixed-kernel", CLUSTER, f"sgl-kernel {describe_groups(kernel)}")
        )
    yield from found
    if not found:
        seen = f"SGLang {next(iter(sglang)) or '?'}"
        seen += f", sglang-sbs {next(iter(plugin))}" if plugin else ", no plugin seen"
        seen += f", sgl-kernel {next(iter(kernel))}" if kernel else ", sgl-kernel not shown"
        yield finding("version.ok", CLUSTER, seen)


def _transfer_backend(facts: EngineFacts) -> str:
    """Return the backend on the engine's command line if shown: mooncake_tcp resolves to
    mooncake."""
    try:
        words = shlex.split(text(facts.data, "launch_command"))
    except ValueError:
        words = []
    given = text_flag(words, "--disaggregation-transfer-backend")
    return given or text(facts.data, "disaggregation_transfer_backend")


def _kv_dtype(facts: EngineFacts) -> str:
    """Return the KV dtype; empty for ``auto``, which depends on the model and is not shown."""
    dtype = text(facts.data, "kv_cache_dtype")
    return "" if dtype == "auto" else dtype


_SHARED: tuple[tuple[str, str, Callable[[EngineFacts], str]], ...] = (
    ("pair.model", "model", lambda e: e.known.model_id),
    ("pair.transfer-backend", "transfer backend", _transfer_backend),
    ("pair.page-size", "page size", lambda e: str(number(e.data, "page_size") or "")),
    ("pair.kv-dtype", "type of KV cache", _kv_dtype),
    (
        "pair.allocation-policy",
        "allocation policy",
        lambda e: text(e.data, "disaggregation_decode_allocation_policy"),
    ),
)
"""Properties that prefill and decode must share, if both report them."""


_FITS = ("pair.tp-differs", "pair.retraction-key", "pair.cache-report")
"""Ids of findings about a pair that do not keep the pair from working."""


def _pairs(prefill: Sequence[EngineFacts], decode: Sequence[EngineFacts]) -> Iterator[Finding]:
    found: list[Finding] = []
    for name, what, value in _SHARED:
        known = grouped([*prefill, *decode], value)
        known.pop("", None)
        if len(known) > 1:
            found.append(finding(name, CLUSTER, f"{what} {describe_groups(known)}"))
    for p, d in sorted({(attention_tp(p), attention_tp(d)) for p in prefill for d in decode}):
        if min(p, d) > 0 and p != d:
            seen = f"attention TP size {p} on prefill, {d} on decode"
            kind = "tp-indivisible" if p % d and d % p else "tp-differs"
            found.append(finding(f"pair.{kind}", CLUSTER, seen))
    prompts = max(e.known.max_request_tokens for e in prefill)
    least = min(e.known.max_request_tokens for e in decode)
    if 0 < least < prompts:
        seen = f"prompts of up to {prompts} tokens on prefill, of {least} on decode"
        found.append(finding("pair.context", CLUSTER, seen))
    found += [*_retraction(prefill, decode), *_cache_report(prefill, decode)]
    yield from found
    if all(finding.id in _FITS for finding in found):
        backend = _transfer_backend(prefill[0]) or "not shown"
        seen = f"{len(prefill)} x {len(decode)} pairs, KV transfer {backend}"
        seen += f", page size {number(prefill[0].data, 'page_size')}"
        yield finding("pair.ok", CLUSTER, seen)


def _retraction(prefill: Sequence[EngineFacts], decode: Sequence[EngineFacts]) -> Iterator[Finding]:
    """Find prefill engines that would refuse to compute a retracted request again.

    Decode asks for that over plain HTTP and without a key, which no probe shows (SGLang's
    ``disaggregation/common/conn.py``, ``submit_prefill_recompute``, 0.5.16 to 0.5.23; sglang
    #25372, #40730)."""
    asks = [e for e in decode if may_rebootstrap(e.known.version)]
    tls = [e.url for e in prefill if e.url.startswith("https:")]
    keyed = [e.url for e in prefill if e.open_without_key is False and e.url not in tls]
    refuses = [(tls, "requires TLS"), (keyed, "requires a key")]
    seen = [f"prefill ({listed(urls, most=6)}) {what}" for urls, what in refuses if urls]
    if asks and seen:
        yield finding("pair.retraction-key", CLUSTER, f"{' and '.join(seen)}; decode sends neither")


def _cache_report(
    prefill: Sequence[EngineFacts], decode: Sequence[EngineFacts]
) -> Iterator[Finding]:
    """Find decode engines that would not show the count of cached tokens. Prefill sends it with the
    KV, but decode needs the flag as well (SGLang's ``disaggregation/decode.py``,
    ``entrypoints/openai/usage_processor.py``)."""
    given = [e for e in prefill if e.data.get("enable_cache_report") is True]
    lacking = [e.url for e in decode if e.data.get("enable_cache_report") is not True]
    if given and lacking:
        seen = f"--enable-cache-report on prefill, not on decode ({listed(lacking, most=6)})"
        yield finding("pair.cache-report", CLUSTER, seen)


def attention_tp(facts: EngineFacts) -> int:
    """TP size within one DP rank; 0 if not reported."""
    ranks, by_attention = dp_ranks(facts.data)
    context_parallel = max(1, number(facts.data, "attn_cp_size"))
    return number(facts.data, "tp_size") // ((ranks if by_attention else 1) * context_parallel)


def grouped(
    engines: Sequence[EngineFacts], value: Callable[[EngineFacts], str]
) -> dict[str, list[str]]:
    """Group URLs by value, in the order of the engines."""
    groups: dict[str, list[str]] = {}
    for facts in engines:
        groups.setdefault(value(facts), []).append(facts.url)
    return groups


def describe_groups(groups: dict[str, list[str]]) -> str:
    """Format groups as ``A (url, url) and B (url)``, the most frequent value first."""
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return "; ".join(f"{value or '?'} ({listed(urls, most=6)})" for value, urls in ordered)
