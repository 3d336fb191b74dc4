"""Rules of gateways and other projects' routers, for comparison: emulations, not their code. What
:class:`SglRouter` and :class:`LlmD` know of caches, queues and books is never late here;
:class:`CacheAware` and :class:`SessionAffinity` know neither KV events nor how many tokens wait."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from hashlib import blake2b, sha256
from itertools import count

from sglang_sbs.scheduling.events import InstanceId
from sglang_sbs.scheduling.policies.immediate import (
    ImmediatePolicy,
    Place,
    RandomRank,
    Worker,
    rank_of,
    ranks_of,
    requests_at,
    requests_of,
    workers_of,
)
from sglang_sbs.scheduling.prefill.instance import Instances
from sglang_sbs.scheduling.request import Request

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_TOKENS = 2**26 // 4
"""Defaults of sglang-router 0.3.2; its tree has 2**26 characters, here taken as four per token."""
PREFIX_WEIGHT, QUEUE_WEIGHT = 2.0, 1.0
"""llm-d-inference-scheduler, ``deploy/config/pd-epp-config.yaml``, profile ``prefill``."""


class CacheAware(RandomRank):
    """``cache_aware`` of the SGLang gateway over SGLang's DP rank, room mod dp.

    The gateway remembers what it sent to which instance. While the numbers of unfinished requests
    differ by no more than 64, or by no more than half as much again, a request goes to the instance
    with the longest prefix of it, if that is more than 0.3 of the prompt, and else to the one with
    the fewest requests, of equal ones the one with the smallest tree. Otherwise it goes to the one
    with the fewest requests whatever is cached. The DP rank is random: the gateway knows no ranks.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._trees: dict[InstanceId, OrderedDict[int, None]] = defaultdict(OrderedDict)
        """Blocks sent there, least recently used first; a name stands for all before it."""

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
    """Rendezvous hashing of the conversation to an instance, and of it to one of its DP ranks: an
    instance that comes or goes moves only the sessions it gets or had. A request without a session
    is one of its own."""

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        key = request.session or request.rid
        return max(workers, key=lambda worker: _hash(f"{key} {worker[0].worker}"))

    def rank_in(self, worker: Worker, request: Request) -> int:
        return _hash(request.session or request.rid) % ranks_of(worker)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class SglRouter(RandomRank):
    """SGLang's new router (``experimental/sgl-router``): ``--policy cache_aware --dp-aware``.

    The worker is the one that has the longest prefix of the prompt, on whichever rank, of equal
    ones the one with the fewest requests in flight; where none has any, the less busy of two at
    random (``policies/cache_aware.rs``, without its pressure guard). Within the worker
    ``policies/dp_rank.rs`` to the letter, first match wins: a request with a session goes to the
    rank its SHA-256 names; one whose prefix ranks have, to the rank with the most of it; any other
    to the rank with the fewest requests in flight. Of equal ones the least busy, in turns.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._rank_turns: dict[InstanceId, Iterator[int]] = defaultdict(count)

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        hits = [max(_hits(request, worker)) for worker in workers]
        if any(hits):
            fewest = min(zip(hits, workers, strict=True), key=lambda o: (-o[0], requests_of(o[1])))
            return fewest[1]
        return min(self._random.sample(workers, min(2, len(workers))), key=requests_of)

    def rank_in(self, worker: Worker, request: Request) -> int:
        if request.session:
            digest = sha256(request.session.encode()).digest()
            return int.from_bytes(digest[:8], "big") % ranks_of(worker)
        hits = _hits(request, worker)
        holders = [number for number, hit in enumerate(hits) if hit == max(hits)]
        first = next(self._rank_turns[worker[0].worker]) % len(holders)
        in_turn = [*holders[first:], *holders[:first]]
        return min(in_turn, key=lambda number: requests_at(worker, number))


class LlmD(RandomRank):
    """llm-d's endpoint picker with its sample configuration for prefill workers; a DP rank is an
    endpoint.

    A score is twice the share of the prompt that is cached (``precise-prefix-cache-scorer``), plus
    1 for the shortest queue, 0 for the longest and what lies between (``queue-scorer``; 1 where all
    are equal). The highest wins, of equal ones any (``max-score-picker``). A queue is the requests
    that are in no pass yet."""

    def choose(self, request: Request, instances: Instances, now_s: float) -> Place:
        workers = workers_of(instances)
        places = [rank_of(one, number) for one in workers for number in range(ranks_of(one))]
        hits = [hit for worker in workers for hit in _hits(request, worker)]
        queues = [instance.ranks[rank].backlog_requests for instance, rank in places]
        shortest, longest = min(queues), max(queues)
        scores = [
            PREFIX_WEIGHT * hit / request.prompt_tokens
            + QUEUE_WEIGHT * ((longest - queue) / (longest - shortest) if longest > shortest else 1)
            for hit, queue in zip(hits, queues, strict=True)
        ]
        best = max(scores)
        return self._random.choice(
            [place for place, score in zip(places, scores, strict=True) if score == best]
        )


def _hits(request: Request, worker: Worker) -> list[int]:
    """Tokens of the prompt that each of its ranks has."""
    places = [rank_of(worker, number) for number in range(ranks_of(worker))]
    return [request.hit_tokens(instance.id, rank) for instance, rank in places]
