"""Named scenarios: cluster shape, workload, and the meaning of load 1.0. They are independent of
policies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from sglang_sbs.simulator.cluster.arrival import Arrival
from sglang_sbs.simulator.cluster.cost import COSTS, PassCost
from sglang_sbs.simulator.cluster.spec import ClusterSpec, InstanceSpec, TierSpec
from sglang_sbs.simulator.workloads import agentic
from sglang_sbs.simulator.workloads.agentic import AgentLoop
from sglang_sbs.simulator.workloads.arrivals import (
    MOONCAKE_BLOCK_TOKENS,
    MOST_PROMPT_TOKENS,
    LengthOf,
    day,
    on_off,
    read_trace,
    replayed,
    synthetic,
    truncated_pareto,
    uniform_like,
    with_long,
    with_own_blocks,
)
from sglang_sbs.simulator.workloads.conversations import LONGEST_TOKENS, PAGE_TOKENS, conversations
from sglang_sbs.simulator.workloads.optimum import optimal_cached_tokens

AGENTIC = "agentic"
"""The closed loop, in which load is a number of agents."""
WARM_UP_S = 20.0
"""Seconds at the start of a run that are not counted."""
_PAPER_3K_QPS = 57.0
"""Requests per second and prefill instance at load 1.0 of ``paper-3k``: the baseline's peak in the
paper (Table 1)."""
LoadCounts = Literal["prompt", "uncached"]
LOAD_COUNTS: tuple[str, ...] = get_args(LoadCounts)
_SHORT = uniform_like(3000)
_SHORT_MEAN_TOKENS = 1000.5
_OWN_LENGTHS = ("paper-", "fixed:", "uniform:", "one-long", "few-long", "onoff", "day")
"""Prefixes of the names of scenarios in which prompts share no beginnings."""
_LONG = truncated_pareto(3072, 65536, 6700.0)
_LONG_TOKENS = 65536
_FEW_LONG_TOKENS = 100, 100_000
_FEW_LONG_SHARE = 0.004
_LONG_EVERY_S = 15.0
"""Seconds between the long prompts of ``one-long``, which are 2.5 % of the work of load 1.0."""
_PHASE_S = 0.5
"""Seconds per phase of ``onoff``."""
DECODE_TOKEN_S = 0.02
"""Seconds per generated token in ``agentic``: 50 tokens per second and user."""
AGENTS_PER_INSTANCE = 28.0
"""Number of agents per instance at load 1.0 of ``agentic``: with it, the mean TTFT of the best
immediate policy equals the scenario's SLO (docs/lab/agentic.md). The chunk is SGLang's 16384 over 8
DP ranks."""
AGENT_WARM_UP_S = 60.0
"""Warm-up of ``agentic`` in seconds, longer than ``WARM_UP_S``, because the device holds contexts
only after the agents' next turns."""
_SAMPLE = 20.0, 500.0, 0
"""Sample of conversations used to calculate load 1.0: rate, seconds, seed."""


NETWORK = {"dispatch_serial_s": 5e-4, "dispatch_jitter": 0.15, "gang_gate_s": 0.04}
"""Defaults for how the requests of a batch reach an instance: one after the other, with jitter, and
gathered by the plugin's batch gate. They are measured on real engines (docs/lab/gangs.md): on a
host that is not overloaded, half of the batches of four or five requests arrive within one or two
milliseconds."""


Workload = list[Arrival] | AgentLoop
"""Requests of a scenario: with fixed times, or in a closed loop of agents."""
Arrivals = Callable[[float, float, int], Workload]
"""Function ``(qps, duration_s, seed)`` that returns the workload."""


class ScenarioError(ValueError):
    """An unknown scenario; the message lists the known ones."""


@dataclass(frozen=True, slots=True)
class Scenario:
    spec: ClusterSpec
    nominal_qps: float
    """Requests per second of the whole cluster at load 1.0."""
    arrivals: Arrivals
    slo_ttft_s: float
    """SLO for the mean time to first token in the capacity search."""
    trace_qps: float = 0.0
    """Mean rate of a trace; 0 for other workloads."""
    agents: float = 0.0
    """Number of agents at load 1.0 in a closed loop, where ``arrivals`` takes their number."""
    warm_up_s: float = WARM_UP_S

    def at_load(self, load: float, duration_s: float, seed: int) -> Workload:
        """Return the workload at a share of the nominal rate, or of the number of agents."""
        return self.arrivals(load * (self.agents or self.nominal_qps), duration_s, seed)


def make_scenario(
    name: str,
    *,
    cost: PassCost = COSTS["mixed"],
    instances: Sequence[Mapping[str, Any]] = (),
    burstiness: float = 1.0,
    load_counts: LoadCounts = "prompt",
    **spec: Any,
) -> Scenario:
    """Build a scenario by name; further keywords go to :class:`ClusterSpec`.

    Args:
        instances: instead of ``prefill_instances`` equal ones, the fields of an
            :class:`InstanceSpec` each; those left out are as for equal instances.
        burstiness: coefficient of variation of the gaps between arrivals; traces and conversations
            have their own.
        load_counts: the tokens that load 1.0 counts if prompts share prefixes. ``prompt``: all
            prompt tokens. ``uncached``: those that a clairvoyant cache does not have, see
            :func:`uncached_qps`.

    Meaning of load 1.0 by scenario:

    - ``paper-3k``, ``paper-5k``: 57 and 70 QPS per prefill instance. These are the baseline peaks
      of the paper, which are physically possible only as figures per instance.
    - ``fixed:TOKENS`` (all prompts have one length): as many tokens per second as in ``paper-3k``.
    - ``uniform:LEAST-MOST`` (lengths between two, evenly): passes full of tokens, or of requests
      with ``prefill_max_requests``.
    - ``one-long``, ``onoff``: as in ``paper-3k``, with the same cluster and lengths. In the first
      an additional prompt of 64K comes now and then; in the second all requests come in every other
      half second.
    - ``paper-long``, ``sessions``, traces, ``few-long`` (prompts of 100 tokens, 0.4 % of them
      100,000): full chunks.
    - ``day``: full chunks as the mean of a day. Load 0.65 rises from 0.2 to 1.1 and falls again.
    - ``agentic``: a number of agents (:mod:`.agentic`). Its caches have tiers.

    If instances differ, each counts by the tokens per second of its full chunks.

    Raises:
        ScenarioError: the name is unknown, or the scenario cannot have this burstiness or
            ``load_counts``.
        TraceError: the trace cannot be read.
        TopologyError: ``changes`` are impossible.
    """
    given = spec.get("block_tokens", 0)
    if given and not name.startswith(_OWN_LENGTHS):
        raise ScenarioError(f"--block-tokens {given}: {name} has blocks of its own, or none")
    if load_counts != "prompt" and name.startswith(_OWN_LENGTHS):
        raise ScenarioError(f"{name}: nothing is cached there, load 1.0 is the paper's")
    kind, colon, text = name.partition(":")
    known = {label.partition(":")[:2]: build for label, build in _BUILDERS.items()}
    build = known.get((kind, colon))
    if build is None or (kind == "trace" and not text):
        raise ScenarioError(f"no scenario {name!r}; one of {', '.join(SCENARIOS)}")
    return build(_Wanted(cost, instances, burstiness, load_counts, spec), text)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Arguments of :func:`make_scenario`."""

    cost: PassCost
    instances: Sequence[Mapping[str, Any]]
    burstiness: float
    load_counts: LoadCounts
    spec: Mapping[str, Any]

    def cluster(
        self, chunk_tokens: int, longest_tokens: int = 0, block_tokens: int = 0
    ) -> ClusterSpec:
        """Build the cluster. Raises: ScenarioError, a rank has not enough KV for the longest
        prompt."""
        shape = {"chunk_tokens": chunk_tokens, "block_tokens": block_tokens, **NETWORK, **self.spec}
        equal = {name: shape[name] for name in ("dp_size", "chunk_tokens") if name in shape}
        spec = ClusterSpec(
            cost=self.cost,
            instances=tuple(InstanceSpec(**(equal | dict(fields))) for fields in self.instances),
            **shape,
        )
        room = spec.kv_capacity_tokens
        if spec.block_tokens and room < longest_tokens:
            raise ScenarioError(f"--kv-tokens {room}: the longest prompt has {longest_tokens}")
        return spec

    def worth(self, shape: ClusterSpec) -> float:
        """Return the number of equal instances to which the cluster's instances are equivalent."""
        if not self.instances:
            return shape.prefill_instances
        single = msgspec.structs.replace(shape, prefill_instances=1, instances=(), changes=())
        return full_chunk_tokens_per_s(shape) / full_chunk_tokens_per_s(single)

    def bursty(self, length_of: LengthOf) -> Callable[[float, float, int], list[Arrival]]:
        return lambda qps, duration_s, seed: with_own_blocks(
            synthetic(qps, duration_s, length_of, seed, burstiness=self.burstiness),
            self.spec.get("block_tokens", 0),
        )

    def nominal_qps(self, shape: ClusterSpec, some: Sequence[Arrival]) -> float:
        """Return the rate of these arrivals that is load 1.0."""
        if self.load_counts == "uncached":
            return uncached_qps(shape, some)
        return full_chunk_tokens_per_s(shape) * len(some) / sum(a.prompt_tokens for a in some)

    def refuse_bursts(self, why: str) -> None:
        if self.burstiness != 1.0:
            raise ScenarioError(f"{why} own bursts; leave the burstiness out")


def _paper_3k(wanted: _Wanted, _text: str) -> Scenario:
    shape = wanted.cluster(3072)
    rate = _PAPER_3K_QPS * wanted.worth(shape)
    return Scenario(shape, rate, wanted.bursty(_SHORT), 0.8)


def _paper_5k(wanted: _Wanted, _text: str) -> Scenario:
    shape = wanted.cluster(5120)
    return Scenario(shape, 70.0 * wanted.worth(shape), wanted.bursty(_SHORT), 1.0)


def _paper_long(wanted: _Wanted, _text: str) -> Scenario:
    shape = wanted.cluster(16384)
    return Scenario(shape, full_chunk_tokens_per_s(shape) / 6700.0, wanted.bursty(_LONG), 4.0)


def _one_long(wanted: _Wanted, text: str) -> Scenario:
    wanted.cluster(3072, _LONG_TOKENS)  # has room for them

    def some_long(qps: float, duration_s: float, seed: int) -> list[Arrival]:
        arrivals = wanted.bursty(_SHORT)(qps, duration_s, seed)
        return with_long(arrivals, duration_s, _LONG_TOKENS, _LONG_EVERY_S)

    return replace(_paper_3k(wanted, text), arrivals=some_long)


def _few_long(wanted: _Wanted, _text: str) -> Scenario:
    short, long = _FEW_LONG_TOKENS
    shape = wanted.cluster(3072, long)
    mean_tokens = short + _FEW_LONG_SHARE * (long - short)
    lengths = wanted.bursty(lambda rng: long if rng.random() < _FEW_LONG_SHARE else short)
    return Scenario(shape, full_chunk_tokens_per_s(shape) / mean_tokens, lengths, 4.0)


def _onoff(wanted: _Wanted, text: str) -> Scenario:
    wanted.refuse_bursts("onoff has its")
    return replace(
        _paper_3k(wanted, text), arrivals=lambda q, d, s: on_off(q, d, _SHORT, s, phase_s=_PHASE_S)
    )


def _day(wanted: _Wanted, text: str) -> Scenario:
    wanted.refuse_bursts("day has its")
    return replace(_paper_3k(wanted, text), arrivals=lambda q, d, s: day(q, d, _SHORT, s))


def _fixed(wanted: _Wanted, text: str) -> Scenario:
    tokens = _length(text)
    shape = wanted.cluster(3072, tokens)
    rate = _PAPER_3K_QPS * _SHORT_MEAN_TOKENS / tokens * wanted.worth(shape)
    return Scenario(shape, rate, wanted.bursty(lambda _: tokens), 0.8)


def _uniform(wanted: _Wanted, text: str) -> Scenario:
    least, most = _lengths(text)
    shape = wanted.cluster(3072, most)
    rate = full_passes_per_s(shape, (least + most) / 2)
    return Scenario(shape, rate, wanted.bursty(lambda rng: rng.randint(least, most)), 0.8)


def _sessions(wanted: _Wanted, _text: str) -> Scenario:
    wanted.refuse_bursts("sessions have their")
    shape = wanted.cluster(16384, LONGEST_TOKENS, PAGE_TOKENS)
    return Scenario(shape, wanted.nominal_qps(shape, conversations(*_SAMPLE)), conversations, 4.0)


def _agentic(wanted: _Wanted, _text: str) -> Scenario:
    if wanted.burstiness != 1.0 or wanted.load_counts != "prompt":
        raise ScenarioError("agentic: agents send after an answer; load is their number")
    tiers = {"tiers": TierSpec(), "decode_token_s": DECODE_TOKEN_S}
    wanted = replace(wanted, spec={**tiers, **wanted.spec, "decode_s": 0.0})
    shape = wanted.cluster(2048, agentic.LONGEST_TOKENS, agentic.PAGE_TOKENS)
    agents = AGENTS_PER_INSTANCE * wanted.worth(shape)

    def loop(agents: float, duration_s: float, seed: int) -> AgentLoop:
        return AgentLoop(max(1, round(agents)), duration_s, seed)

    return Scenario(shape, math.nan, loop, 6.0, agents=agents, warm_up_s=AGENT_WARM_UP_S)


def _trace(wanted: _Wanted, file: str) -> Scenario:
    wanted.refuse_bursts("a trace has its")
    trace = read_trace(Path(file))
    chunk_tokens = 4096 if file.lower().endswith(".csv") else 16384
    block_tokens = MOONCAKE_BLOCK_TOKENS if any(arrival.blocks for arrival in trace) else 0
    longest = max(arrival.prompt_tokens for arrival in trace)
    shape = wanted.cluster(chunk_tokens, longest, block_tokens)
    rate = len(trace) / max(1e-9, trace[-1].at_s)
    nominal_qps = wanted.nominal_qps(shape, trace)
    return Scenario(
        shape, nominal_qps, lambda q, d, s: replayed(trace, q / rate, d, s), 4.0, trace_qps=rate
    )


_BUILDERS: dict[str, Callable[[_Wanted, str], Scenario]] = {
    "paper-3k": _paper_3k,
    "paper-5k": _paper_5k,
    "paper-long": _paper_long,
    "fixed:TOKENS": _fixed,
    "uniform:LEAST-MOST": _uniform,
    "one-long": _one_long,
    "few-long": _few_long,
    "onoff": _onoff,
    "day": _day,
    "sessions": _sessions,
    AGENTIC: _agentic,
    "trace:FILE": _trace,
}
"""Builders by scenario name; each gets the text after the colon."""
SCENARIOS = tuple(_BUILDERS)


def _length(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MOST_PROMPT_TOKENS:
        raise ScenarioError(
            f"fixed:{text}: write how many tokens every prompt has, 1 to {MOST_PROMPT_TOKENS}, "
            "as in fixed:1600"
        )
    return int(text)


def _lengths(text: str) -> tuple[int, int]:
    try:
        least, most = map(_length, text.split("-"))
    except ValueError:
        least, most = 1, 0
    if least > most:
        raise ScenarioError(
            f"uniform:{text}: write the shortest and the longest prompt in tokens, 1 to "
            f"{MOST_PROMPT_TOKENS}, as in uniform:100-300"
        )
    return least, most


def full_passes_per_s(spec: ClusterSpec, mean_tokens: float) -> float:
    """Return the requests of this mean length per second if every pass is as full as the engine
    allows."""
    rate = 0.0
    for _, instance in spec.prefill:
        most = instance.chunk_tokens / mean_tokens
        requests = min(most, spec.prefill_max_requests or most)
        pass_s = spec.cost.pass_s([round(requests * mean_tokens)], [0.0], [round(requests)])
        rate += instance.dp_size * instance.speed * requests / pass_s
    return rate


def full_chunk_tokens_per_s(spec: ClusterSpec) -> float:
    """Return the tokens per second if every pass has a full chunk on every rank."""
    full_s = spec.cost.full_chunk_s
    each = (instance for _, instance in spec.prefill)
    return sum(
        instance.capacity_tokens * instance.speed / full_s(instance.chunk_tokens)
        for instance in each
    )


def uncached_qps(spec: ClusterSpec, arrivals: Sequence[Arrival]) -> float:
    """Return the rate that keeps the cluster busy if it computes only the tokens that the
    clairvoyant cache of :mod:`.optimum` does not have, perfectly balanced. A token takes its share
    of a full chunk, and the time of its attention to all tokens before it. No policy can serve a
    higher rate for long."""
    cached = optimal_cached_tokens(arrivals, spec.block_tokens, spec.cluster_kv_tokens)
    sizes = [(a.prompt_tokens, hit) for a, hit in zip(arrivals, cached, strict=True)]
    tokens = sum(size - hit for size, hit in sizes)
    pairs = sum((size**2 - hit**2) / 2 for size, hit in sizes)
    rate = 0.0
    for _, instance in spec.prefill:
        token_s = spec.cost.full_chunk_s(instance.chunk_tokens) / instance.chunk_tokens
        rank_s = (tokens * token_s + pairs * spec.cost.pair_s) / len(arrivals)
        rate += instance.dp_size * instance.speed / rank_s
    return rate
