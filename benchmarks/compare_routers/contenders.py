"""Who is compared: names, command lines, and the engine flags each of them needs.

Owns the list of contenders. Must not know how they are run or measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.demo.runs import policy_flags
from benchmarks.router_processes import STOCK, Contender

OPTIONAL_PACKAGE_HINT = "install the bench extra: pip install 'sglang-sbs[bench]'"
PACKAGE_HINTS = {"dynamo": "pip install ai-dynamo-runtime==1.6.1"}
"""Of packages that are in no extra: this one has 230 MB, and pins pydantic."""


@dataclass(frozen=True, slots=True)
class EngineVariant:
    """Flags the engines are started with for some contenders."""

    name: str
    flags: tuple[str, ...] = ()
    prefill_flags: tuple[str, ...] = ()


ENGINE_VARIANTS = {
    variant.name: variant
    for variant in (
        EngineVariant(STOCK),
        EngineVariant("total_tokens", flags=("--load-balance-method", "total_tokens")),
        EngineVariant("delayer", prefill_flags=("--enable-prefill-delayer",)),
    )
}
"""By name. ``total_tokens``: the engine and not the bootstrap room chooses the prefill DP rank.
``delayer``: ranks wait for each other before a prefill pass."""


def _stock(policy: str, engines: str = STOCK) -> Contender:
    suffix = "" if engines == STOCK else f"@{engines}"
    return Contender(
        f"sglang_router:{policy}{suffix}",
        "sglang_router.launch_router",
        ("--policy", policy, "--worker-startup-check-interval", "1"),
        engines,
    )


def _ours(name: str, policy: str, *flags: str) -> Contender:
    """``policy``: one of :data:`benchmarks.demo.runs.POLICY_NAMES`."""
    module = "sglang_sbs.launch_router"
    return Contender(name, module, (*policy_flags(policy), *flags), STOCK, ours=True)


def _smg(name: str, *flags: str, engines: str = STOCK) -> Contender:
    return Contender(
        name, "smg.launch_router", ("--worker-startup-check-interval", "1", *flags), engines
    )


def _mini_lb(engines: str = STOCK) -> Contender:
    return Contender(
        "mini_lb" if engines == STOCK else f"mini_lb@{engines}",
        "sglang_router.launch_router",
        ("--mini-lb", "--policy", "random"),
        engines,
        ready_path="/health",
    )


_MIN_TOKENS = "--dp-minimum-tokens-scheduler"

FIELD: tuple[Contender, ...] = (
    _ours("sbs", "sbs"),
    _ours("sbs_paper", "sbs_paper"),
    _ours("sbs_no_gate", "sbs", "--sbs-gang-gate", "off"),
    # Without `session`: no two requests of these loads are of one conversation.
    *(
        _ours(policy, policy)
        for policy in (
            *("eta", "least_tokens", "least_requests", "stale_tokens", "sgl_router", "llm_d"),
            *("random_rank", "round_robin", "power_of_two", "random"),
        )
    ),
    _stock("random"),
    _stock("round_robin"),
    _stock("power_of_two"),
    _stock("cache_aware"),
    _mini_lb(),
    _smg("smg"),
    _smg("smg:round_robin", "--policy", "round_robin"),
    _smg("smg:min_tokens", _MIN_TOKENS),
    Contender(
        "dynamo_kv",
        "benchmarks.compare_routers.rivals.dynamo",
        (),
        library="dynamo",
        tokenizes=True,
    ),
    _stock("round_robin", "total_tokens"),
    _stock("power_of_two", "total_tokens"),
    _mini_lb("total_tokens"),
    _smg("smg:round_robin@total_tokens", "--policy", "round_robin", engines="total_tokens"),
    # Its own choice of the prefill rank is refused by engines that follow the bootstrap room.
    _smg("smg:min_tokens@total_tokens", _MIN_TOKENS, engines="total_tokens"),
    _stock("round_robin", "delayer"),
    _stock("power_of_two", "delayer"),
    _mini_lb("delayer"),
    _smg("smg:round_robin@delayer", "--policy", "round_robin", engines="delayer"),
)

BY_NAME = {contender.name: contender for contender in FIELD}


def chosen(words: str) -> list[Contender]:
    """The contenders of a comma-separated list, in the order of :data:`FIELD`; ``all`` is all.

    Raises:
        ValueError: an unknown name; the message has the known ones.
    """
    if words == "all":
        return list(FIELD)
    names = [word.strip() for word in words.split(",") if word.strip()]
    unknown = [name for name in names if name not in BY_NAME]
    if unknown or not names:
        what = repr(unknown[0]) if unknown else "nothing"
        raise ValueError(f"{what} is not one of all, {', '.join(BY_NAME)}")
    return [contender for contender in FIELD if contender.name in names]
