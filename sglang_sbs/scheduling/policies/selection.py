"""Which policy and which decode rule a configuration names. Owns nothing else."""

from __future__ import annotations

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode.rules import (
    DecodeRuleFunction,
    PowerOfTwoDecode,
    RoundRobinDecode,
    fewest_requests,
    iqr_lexicographic,
    potential,
)
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.policies.emulations import LlmD, SglRouter
from sglang_sbs.scheduling.policies.gateway_caches import CacheAware, SessionAffinity
from sglang_sbs.scheduling.policies.immediate import (
    Eta,
    LeastRequests,
    LeastTokens,
    PowerOfTwo,
    Random,
    RandomRank,
    RoundRobin,
    StaleTokens,
)
from sglang_sbs.scheduling.policies.paper import PaperTrigger
from sglang_sbs.scheduling.policies.policy import PrefillPolicy
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.priority import Urgency


def make_policy(config: SchedulerConfig, interval: IntervalController) -> PrefillPolicy:
    """The policy that ``--policy`` and ``--sbs-trigger`` name."""
    match config.policy:
        case "sbs":
            if config.trigger == "paper":
                return PaperTrigger(interval)
            return AdaptiveTrigger(
                interval,
                max_hold_s=config.max_hold_s,
                urgency=Urgency(interval, config.priority_step_s),
            )
        case "round_robin":
            return RoundRobin()
        case "random":
            return Random(config.seed)
        case "random_rank":
            return RandomRank(config.seed)
        case "power_of_two":
            return PowerOfTwo(config.seed)
        case "least_requests":
            return LeastRequests()
        case "least_tokens":
            return LeastTokens()
        case "stale_tokens":
            return StaleTokens(config.seed, config.stale_s)
        case "eta":
            return Eta(interval)
        case "cache_aware":
            return CacheAware(config.seed)
        case "session":
            return SessionAffinity()
        case "sgl_router":
            return SglRouter(config.seed)
        case "llm_d":
            return LlmD(config.seed)


def make_decode_rule(config: SchedulerConfig) -> DecodeRuleFunction:
    """``--sbs-decode`` of ours; of a baseline the rule that goes with it."""
    if config.policy == "sbs":
        return iqr_lexicographic(config.iqr_k) if config.decode_rule == "iqr" else potential
    if config.policy in ("least_requests", "least_tokens", "eta", "cache_aware", "llm_d"):
        return fewest_requests
    if config.policy in ("power_of_two", "sgl_router"):
        return PowerOfTwoDecode(config.seed)
    return RoundRobinDecode()
