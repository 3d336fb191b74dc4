"""Which policy and which decode rule a configuration names. Owns nothing else."""

from __future__ import annotations

from collections.abc import Callable

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode import rules
from sglang_sbs.scheduling.policies import gateways, immediate
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.policies.paper import PaperTrigger
from sglang_sbs.scheduling.policies.policy import PrefillPolicy
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.priority import Urgency

_BASELINES: dict[str, Callable[[SchedulerConfig, IntervalController], PrefillPolicy]] = {
    "round_robin": lambda _config, _interval: immediate.RoundRobin(),
    "random": lambda config, _interval: immediate.Random(config.seed),
    "random_rank": lambda config, _interval: immediate.RandomRank(config.seed),
    "power_of_two": lambda config, _interval: immediate.PowerOfTwo(config.seed),
    "least_requests": lambda _config, _interval: immediate.LeastRequests(),
    "least_tokens": lambda _config, _interval: immediate.LeastTokens(),
    "stale_tokens": lambda config, _interval: immediate.StaleTokens(config.seed, config.stale_s),
    "eta": lambda _config, interval: immediate.Eta(interval),
    "cache_aware": lambda config, _interval: gateways.CacheAware(config.seed),
    "session": lambda _config, _interval: gateways.SessionAffinity(),
    "sgl_router": lambda config, _interval: gateways.SglRouter(config.seed),
    "llm_d": lambda config, _interval: gateways.LlmD(config.seed),
}


def make_policy(config: SchedulerConfig, interval: IntervalController) -> PrefillPolicy:
    """The policy that ``--policy`` and ``--sbs-trigger`` name."""
    if config.policy != "sbs":
        return _BASELINES[config.policy](config, interval)
    if config.trigger == "paper":
        return PaperTrigger(interval)
    urgency = Urgency(interval, config.priority_step_s)
    return AdaptiveTrigger(interval, max_hold_s=config.max_hold_s, urgency=urgency)


def make_decode_rule(config: SchedulerConfig) -> rules.DecodeRuleFunction:
    """``--sbs-decode`` of ours; of a baseline the rule that goes with it."""
    match config.policy:
        case "sbs" if config.decode_rule == "iqr":
            return rules.iqr_lexicographic(config.iqr_k)
        case "sbs":
            return rules.potential
        case "least_requests" | "least_tokens" | "eta" | "cache_aware" | "llm_d":
            return rules.fewest_requests
        case "power_of_two" | "sgl_router":
            return rules.PowerOfTwoDecode(config.seed)
        case _:
            return rules.RoundRobinDecode()
