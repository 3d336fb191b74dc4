"""Rules of other projects' routers, to compare with: emulations, not their code. What
:class:`SglRouter` and :class:`LlmD` know of caches, queues and books is never late here.

``SGLANG_SBS_POLICIES=benchmarks.emulations`` makes them policies of every command."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import count

from sglang_sbs.policies import (
    Instances,
    Place,
    PolicySpec,
    RandomRank,
    Request,
    Worker,
    rank_of,
    ranks_of,
    requests_at,
    requests_of,
    workers_of,
)

PREFIX_WEIGHT, QUEUE_WEIGHT = 2.0, 1.0
"""llm-d-inference-scheduler, ``deploy/config/pd-epp-config.yaml``, profile ``prefill``."""
POLLED_S = 1.0
"""Age of the loads that a polling gateway sees."""


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
        self._rank_turns: dict[str, Iterator[int]] = defaultdict(count)

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
        places = [
            rank_of(worker, number) for worker in workers for number in range(ranks_of(worker))
        ]
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
    places = [rank_of(worker, number) for number in range(ranks_of(worker))]
    return [request.hit_tokens(instance.id, rank) for instance, rank in places]


class StaleTokens(RandomRank):
    """The instance with the fewest unfinished prompt tokens, a random DP rank, as a gateway sees it
    that polls loads every :data:`POLLED_S` and keeps no books in between: all arrivals of one
    interval herd to the same instance."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._polled_s = float("-inf")
        self._tokens: dict[str, int] = {}

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        if now_s - self._polled_s >= POLLED_S:
            self._polled_s = now_s
            self._tokens = {
                worker[0].worker: sum(rank.outstanding_tokens for i in worker for rank in i.ranks)
                for worker in workers
            }
        return min(workers, key=lambda worker: self._tokens.get(worker[0].worker, 0))


POLICIES = (
    PolicySpec(
        name="sgl_router",
        make=lambda context: SglRouter(context.config.seed),
        decode="power_of_two",
        reads_prefixes=True,
        summary="As SGLang's new router chooses (cache_aware, dp-aware).",
        choose_when="To compare with it.",
        trade_offs="The real one learns of caches and queues later.",
    ),
    PolicySpec(
        name="llm_d",
        make=lambda context: LlmD(context.config.seed),
        reads_reports=True,
        reads_prefixes=True,
        fallback="least_tokens",
        summary="By llm-d's scores: prefix, queue.",
        choose_when="To compare with it.",
        trade_offs="The real one learns of caches and queues later.",
    ),
    PolicySpec(
        name="stale_tokens",
        make=lambda context: StaleTokens(context.config.seed),
        decode="round_robin",
        fallback="least_tokens",
        summary="least_tokens by loads a second old, as gateways that poll.",
        choose_when="To compare with them.",
        trade_offs="All arrivals of one interval herd to the same instance.",
    ),
)
