"""Cache affinity as gateways have it today, for comparison: approximate trees, pinned sessions.
Must not know KV events, what DP ranks have cached, or how many tokens wait."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.immediate import (
    ImmediatePolicy,
    Place,
    Random,
    Worker,
    rank_of,
    ranks_of,
    requests_of,
    workers_of,
)
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_TOKENS = 2**26 // 4
"""Defaults of sglang-router 0.3.2; its tree has 2**26 characters, here taken as four per token."""


class CacheAware(Random):
    """``cache_aware`` of the SGLang gateway over SGLang's DP rank, room mod dp.

    The gateway remembers what it sent to which instance. While the numbers of unfinished requests
    differ by no more than 64, or by no more than half as much again, a request goes to the instance
    with the longest prefix of it, if that is more than 0.3 of the prompt, and else to the one with
    the fewest requests, of equal ones the one with the smallest tree. Otherwise it goes to the one
    with the fewest requests whatever is cached. The DP rank is random: the gateway knows no ranks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._trees: dict[InstanceId, OrderedDict[int, None]] = {}
        """Blocks sent there, least recently used first; a name stands for all before it."""

    def choose(self, request: Request, instances: Sequence[PrefillInstance], now_s: float) -> Place:
        workers = {worker[0].worker: worker for worker in workers_of(instances)}
        name = self._worker_of(request, workers)
        self._remember(name, request)
        return self.any_rank_of(workers[name])

    def _worker_of(self, request: Request, workers: Mapping[InstanceId, Worker]) -> InstanceId:
        loads = {name: requests_of(worker) for name, worker in workers.items()}
        fewest, most = min(loads.values()), max(loads.values())
        if most - fewest > BALANCE_ABS_THRESHOLD and most > BALANCE_REL_THRESHOLD * fewest:
            return min(workers, key=lambda name: loads[name])
        matched = {name: self._matched_tokens(name, request) for name in workers}
        best = max(workers, key=lambda name: (matched[name], -loads[name]))
        if matched[best] > CACHE_THRESHOLD * request.prompt_tokens:
            return best
        return min(workers, key=lambda name: (loads[name], len(self._trees.get(name, ()))))

    def _matched_tokens(self, instance: InstanceId, request: Request) -> int:
        tree = self._trees.get(instance, ())
        for index, block in enumerate(request.blocks):
            if block not in tree:
                return index * request.block_tokens
        return len(request.blocks) * request.block_tokens

    def _remember(self, instance: InstanceId, request: Request) -> None:
        if not request.blocks:
            return
        tree = self._trees.setdefault(instance, OrderedDict())
        for block in reversed(request.blocks):
            tree[block] = None
            tree.move_to_end(block)
        while len(tree) * request.block_tokens > MAX_TREE_TOKENS:
            tree.popitem(last=False)


class SessionAffinity(ImmediatePolicy):
    """Rendezvous hashing of the conversation to an instance, and of it to one of its DP ranks: an
    instance that comes or goes moves only the sessions it gets or had. A request without a session
    is one of its own."""

    def choose(self, request: Request, instances: Sequence[PrefillInstance], now_s: float) -> Place:
        key = request.session or request.rid
        worker = max(workers_of(instances), key=lambda one: _hash(f"{key} {one[0].worker}"))
        return rank_of(worker, _hash(key) % ranks_of(worker))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
