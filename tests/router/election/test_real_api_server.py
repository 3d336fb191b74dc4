"""The election by a Lease, on a real API server where ``KUBE_APISERVER`` names one.

The user of these tests may do what ``examples/kubernetes/rbac.yaml`` grants, and no more.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from campaigns import candidate, running
from harness.until import until

from benchmarks.chaos.etcd_process import etcd_binary
from benchmarks.chaos.kube_apiserver import ApiServer, apiserver_binary, running_apiserver
from sglang_sbs.router.election.candidate import Record
from sglang_sbs.router.election.election import Refused, StoreError
from sglang_sbs.router.election.lease import KubernetesLease

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        apiserver_binary() is None or etcd_binary() is None, reason="no kube-apiserver, or no etcd"
    ),
]
NAME = "sglang-sbs"
URL = f"k8s://llm/{NAME}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ApiServer]:
    async with running_apiserver(tmp_path_factory.mktemp("kubernetes")) as one:
        yield one


@pytest_asyncio.fixture(loop_scope="module")
async def api(
    server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[ApiServer]:
    """Without the Lease."""
    await server.call("DELETE", server.lease(NAME))
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    yield server


@pytest_asyncio.fixture(loop_scope="module")
async def store(api: ApiServer) -> AsyncIterator[KubernetesLease]:
    lease = KubernetesLease("llm", NAME, 2)
    await lease.open()
    yield lease
    await lease.close()


async def test_a_lease_is_written_kept_and_released(api: ApiServer, store: KubernetesLease) -> None:
    nothing = await store.read()
    assert nothing == Record()
    taken = await store.take(nothing, "me#1", 1)
    status, kept = await api.call("GET", api.lease(NAME))
    assert status == 200
    acquired = kept["spec"]["acquireTime"]
    assert kept["spec"] == {
        "holderIdentity": "me#1",
        "leaseDurationSeconds": 2,
        "leaseTransitions": 1,
        "acquireTime": acquired,
        "renewTime": acquired,
    }
    kept["metadata"]["annotations"] = {"owner": "ops"}
    assert (await api.call("PUT", api.lease(NAME), kept))[0] == 200
    with pytest.raises(Refused):
        await store.renew(taken)
    seen = await store.read()
    assert seen.same_as(taken) and seen.version != taken.version
    renewed = await store.renew(seen)
    assert not renewed.same_as(taken) and renewed.term == 1
    await store.release(renewed)
    _, kept = await api.call("GET", api.lease(NAME))
    assert kept["metadata"]["annotations"] == {"owner": "ops"}
    assert kept["spec"]["acquireTime"] == acquired < kept["spec"]["renewTime"]
    assert (await store.read()).holder == ""


async def test_who_comes_second_is_refused(api: ApiServer, store: KubernetesLease) -> None:
    other = KubernetesLease("llm", NAME, 2)
    await other.open()
    for _ in range(2):
        seen, also_seen = await store.read(), await other.read()
        await store.take(seen, "me#1", seen.term + 1)
        with pytest.raises(Refused):
            await other.take(also_seen, "other#1", seen.term + 1)
    mine = await store.read()
    assert (await api.call("DELETE", api.lease(NAME)))[0] == 200
    with pytest.raises(Refused):
        await store.renew(mine)
    await other.close()


async def test_the_lead_moves_when_the_server_hangs_and_when_it_ends(api: ApiServer) -> None:
    first, second = candidate(URL, 1), candidate(URL, 2)
    async with running(first):
        await until(lambda: first.words == [1])
        async with running(second):
            api.stop()
            try:
                await until(lambda: first.words == [1, 0])
                assert not second.leads
            finally:
                api.go_on()
            await until(lambda: first.leads or second.leads)
            leader, other = (first, second) if first.leads else (second, first)
            assert leader.words[-1] == 2
            assert leader.task is not None
            leader.task.cancel()
            await until(lambda: other.leads)
            assert other.words[-1] == 3


async def test_the_role_of_the_examples_is_enough_and_no_more(api: ApiServer) -> None:
    store = KubernetesLease("llm", "somebody-elses", 2)
    await store.open()
    with pytest.raises(StoreError, match=r"403.*needs a Role in namespace llm to get leases"):
        await store.read()
    await store.close()
