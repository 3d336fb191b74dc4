"""Tenants take turns by weight; names are bounded, and nobody saves up."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_sbs.scheduling.events import RequestArrived
from sglang_sbs.scheduling.queue.fairness import MOST_TENANTS, QUANTUM_TOKENS, SHARED, TenantTurns
from sglang_sbs.scheduling.queue.request import RequestQueue, arrived
from sglang_sbs.scheduling.request import Request


def request(number: int, tenant: str, tokens: int = 100, at_s: float | None = None) -> Request:
    event = RequestArrived(rid=f"r{number}", prompt_tokens=tokens, tenant=tenant)
    return arrived(event, number, float(number) if at_s is None else at_s, 1e6)


def queue_of(requests: list[Request], weights: dict[str, float] | None = None) -> RequestQueue:
    queue = RequestQueue(turns=TenantTurns(weights or {}))
    for request in requests:
        queue.add(request)
    return queue


def serve(queue: RequestQueue, count: int) -> list[Request]:
    served = []
    for _ in range(count):
        request = next(iter(queue.in_order()))
        queue.dispatch(request)
        served.append(request)
    return served


def test_without_tenants_nothing_is_kept_and_the_order_is_that_of_the_keys():
    queue = queue_of([request(number, "") for number in range(5)])
    assert not queue.turns.active
    assert [request.order for request in queue.in_order()] == [0, 1, 2, 3, 4]


def test_one_tenant_is_like_none():
    queue = queue_of([request(number, "a") for number in range(5)])
    assert not queue.turns.several
    assert [request.order for request in queue.in_order()] == [0, 1, 2, 3, 4]


def test_a_flood_of_one_tenant_does_not_keep_another_waiting():
    flood = [request(number, "flood", 1000) for number in range(50)]
    queue = queue_of([*flood, request(50, "late", 1000)])
    first = serve(queue, 4)
    assert "late" in {request.tenant for request in first}


def test_two_to_one_is_two_to_one():
    requests = [request(number, "ab"[number % 2], 500) for number in range(200)]
    served = serve(queue_of(requests, {"a": 2.0}), 90)
    shares = [sum(request.tenant == name for request in served) for name in "ab"]
    assert abs(shares[0] - 2 * shares[1]) <= 3 * QUANTUM_TOKENS / 500


def test_within_a_round_the_most_urgent_goes_first():
    requests = [request(0, "a"), request(1, "b"), request(2, "a")]
    assert [request.order for request in queue_of(requests).in_order()] == [0, 1, 2]


def test_turns_are_not_saved_up_while_nothing_waits():
    queue = queue_of([request(number, "busy", 1000) for number in range(100)])
    queue.add(request(100, "other", 1000))
    serve(queue, 60)  # the other one has had its turn, and is idle since
    for number in range(101, 121):
        queue.add(request(number, "other", 1000))
    tenants = [request.tenant for request in serve(queue, 20)]
    assert 7 <= tenants.count("other") <= 13


def test_everything_is_forgotten_when_nothing_waits():
    queue = queue_of([request(0, "a"), request(1, "b")])
    serve(queue, 2)
    assert not queue.turns.active
    assert queue.turns._served == {}


def test_strangers_with_many_names_share_a_turn():
    queue = queue_of([request(number, f"t{number}") for number in range(3 * MOST_TENANTS)])
    assert len(queue.turns._served) <= MOST_TENANTS + 1
    shared = [request for request in queue.in_order() if request.tenant == SHARED]
    assert len(shared) >= MOST_TENANTS
    assert len(list(queue.in_order())) == 3 * MOST_TENANTS


names = st.sampled_from(["", "a", "b", "c"])
steps = st.lists(
    st.tuples(st.sampled_from(["add", "serve", "leave"]), names, st.integers(1, 5000)),
    max_size=120,
)


@settings(deadline=None)
@given(steps)
def test_the_order_has_everybody_once_and_one_tenants_requests_by_key(steps):
    queue = RequestQueue()
    for number, (step, tenant, size) in enumerate(steps):
        waiting = list(queue.in_order())
        if step == "add":
            queue.add(request(number, tenant, size))
        elif waiting and step == "serve":
            queue.dispatch(waiting[size % len(waiting)])
        elif waiting:
            queue.remove(waiting[size % len(waiting)].rid)
        order = list(queue.in_order())
        assert sorted(request.rid for request in order) == sorted(request.rid for request in queue)
        for name in {request.tenant for request in order}:
            keys = [request.key for request in order if request.tenant == name]
            assert keys == sorted(keys)


@settings(deadline=None)
@given(
    st.fixed_dictionaries({"a": st.floats(0.1, 10.0), "b": st.floats(0.1, 10.0)}),
    st.lists(st.integers(1, 8000), min_size=60, max_size=120),
)
def test_no_tenant_starves(weights, sizes):
    """While all of them wait, what two tenants were served differs, over their weights, by no more
    than a quantum and the largest request of each."""
    requests = [request(n, "abc"[n % 3], size) for n, size in enumerate(sizes)]
    queue = queue_of(requests, weights)
    weight_of = {"a": weights["a"], "b": weights["b"], "c": 1.0}
    served = dict.fromkeys("abc", 0.0)
    largest = {
        name: max(request.prompt_tokens for request in requests if request.tenant == name) / weight
        for name, weight in weight_of.items()
    }
    while True:
        waiting = {request.tenant for request in queue}
        if waiting != set("abc"):
            break
        (asked,) = serve(queue, 1)
        served[asked.tenant] += asked.prompt_tokens / weight_of[asked.tenant]
        for name in "abc":
            for other in "abc":
                ahead = served[name] - served[other]
                assert ahead <= QUANTUM_TOKENS + largest[name] + largest[other] + 1e-6


class CountedKey(float):
    """A key that counts how often one was compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.compared += 1
        return float.__eq__(self, other)  # type: ignore[arg-type]

    __hash__ = float.__hash__


def test_the_first_few_of_many_tenants_cost_no_look_at_each_tenant():
    queue = RequestQueue(key_of=lambda request: CountedKey(request.arrived_s * 7 % 11))
    for number in range(600):
        queue.add(request(number, f"tenant {number % 300}"))
    for number in range(0, 600, 3):
        queue.remove(f"r{number}")
    CountedKey.compared = 0
    first = [request.order for request in queue.first(5)]
    assert CountedKey.compared == 0
    assert first == sorted((n for n in range(600) if n % 3), key=lambda n: (n * 7 % 11, n))[:5]
    for number in range(600):
        queue.remove(f"r{number}")
    assert list(queue.first(5)) == []
    queue.add(request(600, "alone"))
    assert [request.order for request in queue.first(5)] == [600]
