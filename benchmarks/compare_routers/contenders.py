"""The routers that are compared: names and command lines."""

from __future__ import annotations

from benchmarks.demo.runs import policy_flags
from benchmarks.router_processes import Contender

OPTIONAL_PACKAGE_HINT = "install the bench extra: pip install 'sglang-sbs[bench]'"
PACKAGE_HINTS = {"dynamo": "pip install ai-dynamo-runtime==1.6.1"}
"""How to install packages that are in no extra: this one has 230 MB, and pins pydantic."""


def _stock(policy: str) -> Contender:
    flags = ("--policy", policy, "--worker-startup-check-interval", "1")
    return Contender(f"sglang_router:{policy}", "sglang_router.launch_router", flags)


def _ours(name: str, policy: str, *flags: str) -> Contender:
    module = "sglang_sbs.launch_router"
    return Contender(name, module, (*policy_flags(policy), *flags), ours=True)


def _smg(name: str, *flags: str) -> Contender:
    return Contender(name, "smg.launch_router", ("--worker-startup-check-interval", "1", *flags))


_MIN_TOKENS = "--dp-minimum-tokens-scheduler"

FIELD: tuple[Contender, ...] = (
    _ours("sbs", "sbs"),
    _ours("sbs_paper", "sbs_paper"),
    _ours("sbs_no_gate", "sbs", "--sbs-gang-gate", "off"),
    # Without `session`: no two requests of these loads are of one conversation.
    *(
        _ours(policy, policy)
        for policy in (
            *("eta", "least_tokens", "least_requests"),
            *("random_rank", "round_robin", "power_of_two", "random"),
        )
    ),
    _stock("random"),
    _stock("round_robin"),
    _stock("power_of_two"),
    _stock("cache_aware"),
    Contender(
        "mini_lb",
        "sglang_router.launch_router",
        ("--mini-lb", "--policy", "random"),
        ready_path="/health",
    ),
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
