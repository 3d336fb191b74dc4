"""The interface for writing policies (docs/own-policy.md). It is stable within a minor release."""

from sglang_sbs.scheduling.policies.immediate import ImmediatePolicy as ImmediatePolicy
from sglang_sbs.scheduling.policies.immediate import Place as Place
from sglang_sbs.scheduling.policies.immediate import RandomRank as RandomRank
from sglang_sbs.scheduling.policies.immediate import Worker as Worker
from sglang_sbs.scheduling.policies.immediate import rank_of as rank_of
from sglang_sbs.scheduling.policies.immediate import ranks_of as ranks_of
from sglang_sbs.scheduling.policies.immediate import requests_at as requests_at
from sglang_sbs.scheduling.policies.immediate import requests_of as requests_of
from sglang_sbs.scheduling.policies.immediate import workers_of as workers_of
from sglang_sbs.scheduling.policies.policy import Admissible as Admissible
from sglang_sbs.scheduling.policies.policy import Placement as Placement
from sglang_sbs.scheduling.policies.policy import Plan as Plan
from sglang_sbs.scheduling.policies.policy import PolicyContext as PolicyContext
from sglang_sbs.scheduling.policies.policy import PrefillPolicy as PrefillPolicy
from sglang_sbs.scheduling.policy_registry import PolicySpec as PolicySpec
from sglang_sbs.scheduling.prefill.instance import Instances as Instances
from sglang_sbs.scheduling.prefill.instance import PrefillInstance as PrefillInstance
from sglang_sbs.scheduling.queue.request import RequestQueue as RequestQueue
from sglang_sbs.scheduling.request import Request as Request
