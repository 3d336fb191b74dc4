"""Rules of other projects' newest routers, for comparison: emulations, not their code. What they
know of caches, queues and books is never late here."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

from sglang_sbs.scheduling.policies.immediate import (
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

PREFIX_WEIGHT, QUEUE_WEIGHT = 2.0, 1.0
"""llm-d-inference-scheduler, ``deploy/config/pd-epp-config.yaml``, profile ``prefill``."""


class SglRouter(Random):
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
        self._turns: dict[str, int] = {}

    def choose(self, request: Request, instances: Sequence[PrefillInstance], now_s: float) -> Place:
        workers = workers_of(instances)
        hits = [max(_hits(request, _places(worker))) for worker in workers]
        if any(hits):
            worker = min(
                zip(workers, hits, strict=True), key=lambda one: (-one[1], requests_of(one[0]))
            )[0]
        else:
            worker = min(self._random.sample(workers, min(2, len(workers))), key=requests_of)
        return self._rank_in(worker, request)

    def _rank_in(self, worker: Worker, request: Request) -> Place:
        if request.session:
            digest = sha256(request.session.encode()).digest()
            return rank_of(worker, int.from_bytes(digest[:8], "big") % ranks_of(worker))
        places = _places(worker)
        hits = _hits(request, places)
        holders = [place for place, hit in zip(places, hits, strict=True) if hit == max(hits)]
        name = worker[0].worker
        turn = self._turns.get(name, 0)
        self._turns[name] = turn + 1
        first = turn % len(holders)
        return min([*holders[first:], *holders[:first]], key=_requests)


class LlmD(Random):
    """llm-d's endpoint picker with its sample configuration for prefill workers; a DP rank is an
    endpoint.

    A score is twice the share of the prompt that is cached (``precise-prefix-cache-scorer``), plus
    1 for the shortest queue, 0 for the longest and what lies between (``queue-scorer``; 1 where all
    are equal). The highest wins, of equal ones any (``max-score-picker``). A queue is the requests
    that are in no pass yet."""

    def choose(self, request: Request, instances: Sequence[PrefillInstance], now_s: float) -> Place:
        places = [place for worker in workers_of(instances) for place in _places(worker)]
        queues = [instance.ranks[rank].backlog_requests for instance, rank in places]
        shortest, longest = min(queues), max(queues)
        scores = [
            PREFIX_WEIGHT * hit / request.prompt_tokens
            + QUEUE_WEIGHT * ((longest - queue) / (longest - shortest) if longest > shortest else 1)
            for hit, queue in zip(_hits(request, places), queues, strict=True)
        ]
        best = max(scores)
        return self._random.choice(
            [place for place, score in zip(places, scores, strict=True) if score == best]
        )


def _places(worker: Worker) -> list[Place]:
    return [rank_of(worker, number) for number in range(ranks_of(worker))]


def _hits(request: Request, places: Sequence[Place]) -> list[int]:
    """Tokens of the prompt that each rank has."""
    return [request.hit_tokens(instance.id, rank) for instance, rank in places]


def _requests(place: Place) -> int:
    """Unfinished ones of a rank."""
    instance, rank = place
    return len(instance.ranks[rank].outstanding)
