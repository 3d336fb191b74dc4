"""Real faults on real engines under load, in a bounded form; `scripts/chaos` has all of them.

Runs on the cluster that other tests share, and leaves it as it was: an instance that is restarted
comes last.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from benchmarks.chaos.endforward_relay import Disturbance, EndForwardRelay
from benchmarks.chaos.faults import (
    FULL_POOL_REQUESTS,
    FULL_POOL_TOKENS,
    STORM_CLIENTS,
    disturbed,
    full_pool,
    paused,
    storm,
)
from benchmarks.chaos.run import Fault, FaultResult, Site, run_fault
from benchmarks.demo.load import Workload
from benchmarks.demo.runs import RouterPorts
from sglang_sbs.cluster.local import LocalCluster
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE
from sglang_sbs.cluster.ports import free_port_blocks

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

WORKLOAD = Workload(qps=8.0, requests=1, max_prompt_tokens=500, max_new_tokens=30)
TAIL_S = 2.0


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def site(
    virtual_cluster: LocalCluster,
    endforward_endpoint: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Site]:
    """The engines, with a relay where they report to; routers listen behind it."""
    first = next(free_port_blocks(PORTS_PER_INSTANCE))
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    relay = EndForwardRelay(endforward_endpoint, f"tcp://127.0.0.1:{ports.endforward}")
    relay.start()
    yield Site(virtual_cluster, relay, ports, tmp_path_factory.mktemp("chaos"))
    await relay.close()


async def under(site: Site, fault: Fault) -> FaultResult:
    """Run a fault, and check that every client got the whole answer and the router's books are
    empty."""
    result = await run_fault(site, fault, workload=WORKLOAD, tail_s=TAIL_S)
    assert result.sent > 20
    assert (result.errors, result.notes) == ({}, result.notes)
    assert (result.answered, result.cut_off, result.unanswered) == (result.sent, 0, 0)
    assert result.left_over == {}
    return result


async def test_a_prefill_instance_that_stops_for_seconds_costs_no_answer(site: Site) -> None:
    result = await under(site, Fault("stop-prefill", "", paused("prefill-0", 4.0)))
    assert result.streams["error"] == 0


async def test_without_any_endforward_everything_is_served(site: Site) -> None:
    received, sent = site.relay.received, site.relay.sent
    result = await under(site, Fault("lose-100", "", disturbed(Disturbance(lost=1.0), 5.0)))
    (note,) = result.notes
    assert note.endswith(" 0 out")
    # There was something to lose, and before and afterwards it arrived.
    assert site.relay.received - received > site.relay.sent - sent > 0


async def test_hundreds_of_clients_that_leave_at_once_leave_nothing_behind(site: Site) -> None:
    result = await under(site, Fault("storm", "", storm))
    assert result.notes == [f"{STORM_CLIENTS} clients: {STORM_CLIENTS} left"]


async def test_a_full_decode_pool_makes_requests_wait_and_loses_none(site: Site) -> None:
    fault = Fault(
        "full-kv", "", full_pool, decode_flags=["--max-total-tokens", str(FULL_POOL_TOKENS)]
    )
    result = await under(site, fault)
    assert result.sent > FULL_POOL_REQUESTS
