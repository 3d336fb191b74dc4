"""Emulates the routing rules of gateways, which use neither KV events nor counts of waiting tokens.
Contains none of the gateways' code."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from hashlib import blake2b

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.immediate import (
    ImmediatePolicy,
    RandomRank,
    Worker,
    ranks_of,
    requests_of,
)
from sglang_sbs.scheduling.policy_registry import PolicySpec
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.request import Request

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_TOKENS = 2**26 // 4
"""Tree size per instance. The four constants are defaults of sglang-router 0.3.2; its tree holds
2**26 characters, here counted as four per token."""


class CacheAware(RandomRank):
    """``cache_aware`` of the SGLang gateway, with a random DP rank: the gateway chooses none, and
    the engine takes the bootstrap room modulo the DP size.

    The gateway keeps a tree of the prompts that it sent to each instance. Instances are unbalanced
    if the numbers of unfinished requests differ by more than 64 and by a factor of more than 1.5.

    - Unbalanced: the request goes to the instance with the fewest requests.
    - Balanced: the request goes to the instance with the longest matching prefix, if that is more
      than 0.3 of the prompt. Otherwise it goes to the instance with the fewest requests; of
      several, the one with the smallest tree.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._trees: dict[InstanceId, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """Names of blocks sent to each instance, least recently used first. A block's name covers
        all blocks before it."""

    def on_topology_change(self, instances: Instances) -> None:
        """Drop the oldest trees of workers that are not up: at most as many stay as workers are up.
        With service discovery every pod has a name of its own."""
        up = {instance.worker for instance in instances}
        down = [name for name in self._trees if name not in up]
        for name in down[: max(0, len(down) - len(up))]:
            del self._trees[name]

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        worker = self._choose(request, workers)
        tree = self._trees[worker[0].worker]
        for block in reversed(request.blocks):
            tree[block] = None
            tree.move_to_end(block)
        while request.blocks and len(tree) * request.block_tokens > MAX_TREE_TOKENS:
            tree.popitem(last=False)
        return worker

    def _choose(self, request: Request, workers: Sequence[Worker]) -> Worker:
        loads = [requests_of(worker) for worker in workers]
        if max(loads) - min(loads) > BALANCE_ABS_THRESHOLD and max(
            loads
        ) > BALANCE_REL_THRESHOLD * min(loads):
            return workers[loads.index(min(loads))]
        trees = [self._trees[worker[0].worker] for worker in workers]
        numbers = range(len(workers))
        matched = [_matched_tokens(tree, request) for tree in trees]
        best = max(numbers, key=lambda n: (matched[n], -loads[n]))
        if matched[best] > CACHE_THRESHOLD * request.prompt_tokens:
            return workers[best]
        return workers[min(numbers, key=lambda n: (loads[n], len(trees[n])))]


def _matched_tokens(tree: OrderedDict[int, None], request: Request) -> int:
    for index, block in enumerate(request.blocks):
        if block not in tree:
            return index * request.block_tokens
    return len(request.blocks) * request.block_tokens


class SessionAffinity(ImmediatePolicy):
    """Policy ``session``: maps each conversation to a worker by rendezvous hashing, and to one of
    its DP ranks by hash. When a worker is added or removed, only the sessions that it gets or had
    move. A request without a session is a session of its own."""

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        key = request.session or request.rid
        return max(workers, key=lambda worker: _hash(f"{key} {worker[0].worker}"))

    def rank_in(self, worker: Worker, request: Request) -> int:
        return _hash(request.session or request.rid) % ranks_of(worker)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


SPECS = (
    PolicySpec(
        name="cache_aware",
        make=lambda context: CacheAware(context.config.seed),
        summary="At once, to the instance that the stock gateway's cache_aware chooses, at random "
        "to one of its DP ranks.",
        choose_when="In simulations, as the baseline that gateway is. The router's --policy "
        "cache_aware means sbs, which knows what each DP rank has cached.",
        trade_offs="It knows what it sent where, not what ranks still have.",
    ),
    PolicySpec(
        name="session",
        make=lambda _: SessionAffinity(),
        decode="round_robin",
        summary="A conversation stays on one DP rank, whatever is there.",
        choose_when="For long conversations at low load, where the client names them.",
        needs="A session in each request: see the table of sessions in docs/cache.md.",
        trade_offs="A busy conversation makes its rank slow for all others there.",
    ),
)
