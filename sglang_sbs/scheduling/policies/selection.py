"""Registers our policies, and creates and keeps those that a configuration names."""

from __future__ import annotations

from sglang_sbs.scheduling.config import SchedulerConfig
from sglang_sbs.scheduling.decode import rules
from sglang_sbs.scheduling.policies import gateways, immediate
from sglang_sbs.scheduling.policies.adaptive.trigger import AdaptiveTrigger
from sglang_sbs.scheduling.policies.offered_load import OfferedLoad
from sglang_sbs.scheduling.policies.paper import PaperTrigger
from sglang_sbs.scheduling.policies.policy import PolicyContext, PrefillPolicy
from sglang_sbs.scheduling.policy_registry import Policy, PolicySpec, register, require
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.priority import Urgency


def _make_sbs(context: PolicyContext) -> PrefillPolicy:
    """Create the variant of ``sbs`` that ``--sbs-trigger`` names: adaptive or paper."""
    config, interval = context.config, context.interval
    if config.trigger == "paper":
        return PaperTrigger(interval)
    urgency = Urgency(interval, config.priority_step_s)
    return AdaptiveTrigger(interval, context.offered, config.max_hold_s, urgency)


SBS = PolicySpec(
    name="sbs",
    make=_make_sbs,
    decode="sbs",
    reads_reports=True,
    reads_prefixes=True,
    fallback="least_tokens",
    summary="Requests wait in the router; a batch leaves for the prefill instance that is about to "
    "be ready, packed over its DP ranks.",
    choose_when="By default: with DP attention over four ranks or more and a load of 0.4 or more "
    "it gains most.",
    needs="EndForward of the plugin, or else health and load polls; KV events or the router's own "
    "memory for prefix caches.",
    trade_offs="At low load, or with one or two ranks, it gains nothing. The few prompts of many "
    "chunks wait longer than under eta while short ones gain.",
)

for _spec in (SBS, *immediate.SPECS, *gateways.SPECS):
    register(_spec)


class Policies:
    """The policies of one scheduler, each created on first use. A policy that is switched off keeps
    what it has learned, so a trial that alternates two policies does not reset them."""

    def __init__(self, interval: IntervalController, *, explains: bool) -> None:
        """``explains``: whether policies record the reasons for their decisions."""
        self.offered = OfferedLoad()
        """Arrival rate and load, for all policies. The scheduler must record every arrival."""
        self._interval = interval
        self._explains = explains
        self._made: dict[Policy, tuple[PrefillPolicy, rules.DecodeRuleFunction]] = {}

    def choose(self, config: SchedulerConfig) -> tuple[PrefillPolicy, rules.DecodeRuleFunction]:
        """Return the policy that ``config`` names, and its decode rule. Configurations of different
        calls may differ only in ``policy``. Raises: PolicyError: the policy does not exist or
        cannot be created."""
        if config.policy not in self._made:
            spec = require(config.policy)
            policy: PrefillPolicy = spec.make(PolicyContext(config, self._interval, self.offered))
            policy.explain(self._explains)
            self._made[config.policy] = policy, make_decode_rule(spec, config)
        chosen = self._made[config.policy]
        self._interval.read_literally(chosen[0].literal_interval)
        return chosen


def make_decode_rule(spec: PolicySpec, config: SchedulerConfig) -> rules.DecodeRuleFunction:
    match spec.decode:
        case "sbs" if config.decode_rule == "iqr":
            return rules.iqr_lexicographic(config.iqr_k)
        case "sbs":
            return rules.potential
        case "fewest_requests":
            return rules.fewest_requests
        case "power_of_two":
            return rules.PowerOfTwoDecode(config.seed)
        case "round_robin":
            return rules.RoundRobinDecode()
