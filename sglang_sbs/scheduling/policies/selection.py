"""Makes the policy and the decode rule that a configuration names, and keeps those in use."""

from __future__ import annotations

from collections.abc import Callable

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode import rules
from sglang_sbs.scheduling.policies import gateways, immediate
from sglang_sbs.scheduling.policies.adaptive.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.policies.paper import PaperTrigger
from sglang_sbs.scheduling.policies.policy import PrefillPolicy
from sglang_sbs.scheduling.policy_names import Policy
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


class Policies:
    """The policies of one scheduler, made when they are first wanted. A policy that is switched
    away from is kept with what it learned, so an A/B in turns starts none of them anew."""

    def __init__(self, interval: IntervalController, *, explains: bool) -> None:
        """``explains``: whether somebody wants to know why requests go where they do."""
        self.offered = OfferedLoad()
        """The arrival rate; to be told of every arrival."""
        self._interval = interval
        self._explains = explains
        self._made: dict[Policy, tuple[PrefillPolicy, rules.DecodeRuleFunction]] = {}

    def choose(self, config: SchedulerConfig) -> tuple[PrefillPolicy, rules.DecodeRuleFunction]:
        """Return the policy that ``config`` names, and the decode rule that goes with it. Of two
        configurations only ``policy`` may differ."""
        if config.policy not in self._made:
            policy = make_policy(config, self._interval, self.offered)
            policy.explains = self._explains
            self._made[config.policy] = policy, make_decode_rule(config)
        chosen = self._made[config.policy]
        self._interval.literal = chosen[0].literal_interval
        return chosen


def make_policy(
    config: SchedulerConfig, interval: IntervalController, offered: OfferedLoad
) -> PrefillPolicy:
    """The policy that ``--policy`` and ``--sbs-trigger`` name."""
    if config.policy != "sbs":
        return _BASELINES[config.policy](config, interval)
    if config.trigger == "paper":
        return PaperTrigger(interval)
    urgency = Urgency(interval, config.priority_step_s)
    return AdaptiveTrigger(interval, offered, config.max_hold_s, urgency)


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
