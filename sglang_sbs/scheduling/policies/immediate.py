"""The immediate policies, which place a request the moment it arrives: baselines as in gateways and
SGLang, and ``eta``, the strongest. Must not know how the queue works, or decode."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import count

from sglang_sbs.scheduling.paging import paged
from sglang_sbs.scheduling.policies.idle_turns import pass_with_s, whose_turn
from sglang_sbs.scheduling.policies.policy import Admissible, Placement, Plan, PrefillPolicy
from sglang_sbs.scheduling.policy_registry import PolicySpec
from sglang_sbs.scheduling.prefill.instance import Instances, PrefillInstance
from sglang_sbs.scheduling.prefill.interval import IntervalController
from sglang_sbs.scheduling.queue.request import RequestQueue
from sglang_sbs.scheduling.request import Request

Place = tuple[PrefillInstance, int]
"""A DP rank: its instance, and its number there."""
Worker = list[PrefillInstance]
"""A worker of a gateway: one instance, or with unsynchronized DP ranks one per rank."""


def workers_of(instances: Instances) -> list[Worker]:
    workers: dict[str, Worker] = {}
    for instance in instances:
        workers.setdefault(instance.worker, []).append(instance)
    return list(workers.values())


def ranks_of(worker: Worker) -> int:
    return sum([instance.dp_size for instance in worker])


def rank_of(worker: Worker, number: int) -> Place:
    """Return instance and rank there of a DP rank, by its number in the worker."""
    return (worker[0], number) if len(worker) == 1 else (worker[number], 0)


def requests_of(worker: Worker) -> int:
    """Return the number of requests dispatched to a worker and not yet prefilled."""
    return sum([len(rank.requests) for instance in worker for rank in instance.ranks])


def requests_at(worker: Worker, number: int) -> int:
    """Return the number of requests dispatched to a worker's DP rank and not yet prefilled."""
    instance, rank = rank_of(worker, number)
    return len(instance.ranks[rank].requests)


class ImmediatePolicy(PrefillPolicy):
    """Base of policies that place every request when it arrives. Subclasses override
    :meth:`rank_in` and :meth:`worker_of` (by default workers take turns), or :meth:`choose`."""

    holds = False

    def __init__(self) -> None:
        self._turns = count()

    def plan(
        self, queue: RequestQueue, instances: Instances, admissible: Admissible, now_s: float
    ) -> Plan:
        request = queue.oldest
        if request is None:
            return Plan()
        instance, rank = self.choose(request, request.allowed_on(instances), now_s)
        return Plan([Placement(request, instance, rank)], reason="immediate")

    def choose(self, request: Request, instances: Instances, now_s: float) -> Place:
        """Return the instance, one of ``instances``, and the DP rank for a request."""
        worker = self.worker_of(request, workers_of(instances), now_s)
        return rank_of(worker, self.rank_in(worker, request))

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        return workers[next(self._turns) % len(workers)]

    def rank_in(self, worker: Worker, request: Request) -> int:
        """Return the DP rank for a request, numbered over the whole worker as in
        :func:`rank_of`."""
        raise NotImplementedError


class RoundRobin(ImmediatePolicy):
    """Policy ``round_robin``: instances take turns, and so do the DP ranks of each instance."""

    def __init__(self) -> None:
        super().__init__()
        self._next_rank: Counter[str] = Counter()

    def rank_in(self, worker: Worker, request: Request) -> int:
        name = worker[0].worker
        number = self._next_rank[name] % ranks_of(worker)
        self._next_rank[name] = number + 1
        return number


class RandomRank(ImmediatePolicy):
    """Policy ``random_rank``: instances take turns, and the DP rank is random. That is the
    gateway's ``round_robin``, with which the engine takes the bootstrap room modulo the DP size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = random.Random(seed)

    def rank_in(self, worker: Worker, request: Request) -> int:
        return self._random.randrange(ranks_of(worker))


class Random(RandomRank):
    """Policy ``random``: a random instance and DP rank, as with the gateway's ``random``."""

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        return self._random.choice(workers)


class LeastRequests(ImmediatePolicy):
    """Policy ``least_requests``: the worker with the fewest requests not yet prefilled, and its DP
    rank with the fewest."""

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        return min(workers, key=requests_of)

    def rank_in(self, worker: Worker, request: Request) -> int:
        return min(range(ranks_of(worker)), key=lambda number: requests_at(worker, number))


class LeastTokens(ImmediatePolicy):
    """Policy ``least_tokens``: of all instances' DP ranks, the one with the fewest uncached prompt
    tokens dispatched and not yet prefilled."""

    def choose(self, request: Request, instances: Instances, now_s: float) -> Place:
        return min(
            ((i, d) for i in instances for d in range(i.dp_size)),
            key=lambda place: place[0].ranks[place[1]].outstanding_tokens,
        )


class PowerOfTwo(RandomRank):
    """Policy ``power_of_two``: of two random workers the one with fewer requests not yet prefilled,
    and a random DP rank, as with the gateway's ``power_of_two``."""

    def worker_of(self, request: Request, workers: Sequence[Worker], now_s: float) -> Worker:
        return min(self._random.sample(workers, min(2, len(workers))), key=requests_of)


class Eta(ImmediatePolicy):
    """Policy ``eta``: the DP rank with the earliest predicted finish of the request, from the
    predicted ends of passes and the ranks' backlogs. The strongest policy that never waits."""

    def __init__(self, interval: IntervalController, *, knows_caches: bool = False) -> None:
        """``knows_caches``: subtract prompt tokens that are in a rank's prefix cache."""
        super().__init__()
        self._interval = interval
        self._knows_caches = knows_caches

    def choose(self, request: Request, instances: Instances, now_s: float) -> Place:
        places = [(self._best_rank(request, instance, now_s), instance) for instance in instances]
        best = min(places, key=lambda place: place[0][:2])
        if best[1].idle:
            # Take turns among idle ones with no less of the prompt cached than the best one.
            equal = [place for place in places if place[1].idle and place[0][1] <= best[0][1]]
            turn = whose_turn([instance for _, instance in equal], best[0][1], request.session)
            best = next(place for place in equal if place[1] is turn)
        return best[1], best[0][2]

    def _best_rank(
        self, request: Request, instance: PrefillInstance, now_s: float
    ) -> tuple[float, int, int]:
        """Return the predicted finish on the best DP rank in seconds from now, the tokens ahead of
        the request plus its own, and the rank."""
        latency_s = self._interval.lone_s
        free_s = max(0.0, instance.free_at_s(now_s, latency_s) - now_s)
        pass_s = pass_with_s(instance, request.prompt_tokens)
        # A pass that ends before the request can arrive is not the one to wait for.
        start_s = free_s + pass_s if instance.passes and free_s < latency_s else free_s
        charged = paged(request.prompt_tokens, instance.page)
        keys = []
        for index, rank in enumerate(instance.ranks):
            if self._knows_caches and request.blocks:
                hit_tokens = request.hit_tokens(instance.id, index)
                charged = paged(max(1, request.prompt_tokens - hit_tokens), instance.page)
            tokens = rank.ahead_tokens + charged
            passes = (tokens - 1) // instance.chunk_tokens + 1
            keys.append((start_s + passes * pass_s, tokens, index))
        return min(keys)


SPECS = (
    PolicySpec(
        name="round_robin",
        make=lambda _: RoundRobin(),
        decode="round_robin",
        summary="At once, to the instances in turn and within one to its DP ranks in turn.",
        choose_when="As a baseline, and where all prompts are equally long.",
        trade_offs="A rank that got a long prompt gets the next one all the same.",
    ),
    PolicySpec(
        name="random",
        make=lambda context: Random(context.config.seed),
        decode="round_robin",
        summary="At once, to a random DP rank of a random instance: the stock gateway's random.",
        choose_when="As a baseline.",
        trade_offs="Some rank always gets several while others are idle.",
    ),
    PolicySpec(
        name="random_rank",
        make=lambda context: RandomRank(context.config.seed),
        decode="round_robin",
        summary="At once, to the instances in turn, the DP rank at random: SGLang's own way.",
        choose_when="As the baseline that an unchanged cluster is.",
        trade_offs="Some rank always gets several while others are idle.",
    ),
    PolicySpec(
        name="power_of_two",
        make=lambda context: PowerOfTwo(context.config.seed),
        decode="power_of_two",
        summary="At once, to the less busy of two random instances, the DP rank at random.",
        choose_when="As the baseline that the stock gateway's power_of_two is.",
        trade_offs="It balances instances, not the DP ranks in them.",
    ),
    PolicySpec(
        name="least_requests",
        make=lambda _: LeastRequests(),
        summary="At once, to the instance and then its DP rank with the fewest open requests.",
        choose_when="Where prompts are short and much alike.",
        trade_offs="A prompt of 100 tokens counts as much as one of 100,000.",
    ),
    PolicySpec(
        name="least_tokens",
        make=lambda _: LeastTokens(),
        summary="At once, to the DP rank with the fewest unfinished prompt tokens.",
        choose_when="Where engines cannot have the plugin. Front ends that cannot reach the "
        "scheduler use it in place of sbs and eta.",
        trade_offs="It does not know when a pass ends, so a request may just miss one.",
    ),
    PolicySpec(
        name="eta",
        make=lambda context: Eta(context.interval),
        reads_reports=True,
        fallback="least_tokens",
        summary="At once, to the DP rank with the earliest predicted finish.",
        choose_when="Where requests must never wait in the router: the strongest policy of that "
        "kind, and the one to compare sbs with.",
        needs="EndForward of the plugin; with load polls alone its predictions are coarse.",
        trade_offs="A request that was sent cannot move when a better place comes up.",
    ),
)
