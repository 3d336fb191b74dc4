"""The election by a Lease, on an API server that refuses what a real one refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from campaigns import QUICK, RecordedCampaign, candidate, running
from harness.until import until

from sglang_sbs.router.election.candidate import ElectionTimes, Record
from sglang_sbs.router.election.election import OutdatedWrite, StoreError
from sglang_sbs.router.election.lease import KubernetesLease
from tools.stand_ins.kubernetes_server import FakeKubernetes

URL = "k8s://llm/sglang-sbs"
KEY = ("llm", "sglang-sbs")


@pytest_asyncio.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    server = FakeKubernetes()
    await server.start()
    monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path)))
    yield server
    await server.stop()


@pytest_asyncio.fixture
async def store(api: FakeKubernetes) -> AsyncIterator[KubernetesLease]:
    lease = KubernetesLease(*KEY, 2)
    await lease.open()
    yield lease
    await lease.close()


async def test_a_lease_is_written_as_client_go_writes_it(
    api: FakeKubernetes, store: KubernetesLease
) -> None:
    nothing = await store.read()
    assert nothing == Record()
    taken = await store.take(nothing, "me#1", 1)
    kept = api.leases.kept[KEY]
    acquired = kept["spec"]["acquireTime"]
    assert kept["spec"] == {
        "holderIdentity": "me#1",
        "leaseDurationSeconds": 2,
        "leaseTransitions": 1,
        "acquireTime": acquired,
        "renewTime": acquired,
    }
    api.leases.annotate(*KEY, owner="ops")
    seen = await store.read()
    assert seen.same_as(taken) and seen.version != taken.version
    renewed = await store.renew(taken)
    assert not renewed.same_as(taken) and renewed.term == 1
    kept = api.leases.kept[KEY]
    assert kept["metadata"]["annotations"] == {"owner": "ops"}
    assert kept["spec"]["acquireTime"] == acquired < kept["spec"]["renewTime"]
    await store.release(renewed)
    assert (await store.read()).holder == ""
    assert api.leases.kept[KEY]["spec"]["leaseTransitions"] == 1


async def test_who_comes_second_is_refused(api: FakeKubernetes, store: KubernetesLease) -> None:
    other = KubernetesLease(*KEY, 2)
    await other.open()
    for _ in range(2):
        # Both saw the same: first no lease at all, then the first one's.
        seen, also_seen = await store.read(), await other.read()
        await store.take(seen, "me#1", seen.term + 1)
        with pytest.raises(OutdatedWrite):
            await other.take(also_seen, "other#1", seen.term + 1)
    mine = await store.read()
    del api.leases.kept[KEY]
    with pytest.raises(OutdatedWrite):
        await store.renew(mine)
    await other.close()


async def test_the_other_leads_in_the_next_term_as_soon_as_the_first_ends(
    api: FakeKubernetes,
) -> None:
    first, second = candidate(URL, 1), candidate(URL, 2)
    async with running(second), running(first):
        leader, other = await leader_and_other(first, second)
        assert leader.terms == [1] and other.terms == []
        await until(lambda: other.campaign.leader == address(leader, first))
        task = leader.task
        assert task is not None
        task.cancel()
        await asyncio.wait([task])
        assert leader.terms == [1, 0] and not leader.campaign.leads()
        # It gave the lock back: nobody waits for as long as it would have lasted.
        assert api.leases.kept[KEY]["spec"]["leaseDurationSeconds"] == 1
        await until(lambda: other.terms == [2])
        assert other.campaign.leader == address(other, first)


async def test_an_api_server_that_hangs_ends_the_lead_and_another_takes_it_then(
    api: FakeKubernetes,
) -> None:
    first, second = candidate(URL, 1), candidate(URL, 2)
    async with running(first), running(second):
        leader, _ = await leader_and_other(first, second)
        api.leases.deaf = True
        await until(lambda: leader.terms == [1, 0])
        assert not first.leads and not second.leads
        await until(lambda: "no response within" in leader.campaign.complaint)
        api.leases.deaf = False
        # Terms rise for everybody, also for who has the lock still.
        await until(lambda: first.leads or second.leads)
        assert max(first.terms + second.terms) == 2


async def test_writes_that_leave_the_holder_end_no_lead(api: FakeKubernetes) -> None:
    times = ElectionTimes(lease_s=3, renew_s=2.0, retry_s=0.1)
    first, second = candidate(URL, 1, times), candidate(URL, 2, times)
    async with running(first), running(second):
        leader, other = await leader_and_other(first, second)
        writes = api.leases.writes
        for number in range(2):
            api.leases.annotate(*KEY, owner=f"ops {number}")
            # A renewal that is done, and answered after the candidate has given it up.
            writes.clear()
            api.leases.late_s = times.ask_s + 0.05
            await until(lambda: bool(writes))
            api.leases.late_s = 0.0
            writes.clear()
            await until(lambda: len(writes) > 2)
        assert (leader.terms, other.terms) == ([1], [])


async def test_a_lease_that_is_deleted_is_made_anew_in_a_higher_term(api: FakeKubernetes) -> None:
    recorded = candidate(URL, 1)
    async with running(recorded):
        await until(lambda: recorded.terms == [1])
        del api.leases.kept[KEY]
        await until(lambda: recorded.terms == [1, 0, 2])
        recorded.campaign.exceed(40)
        assert recorded.terms == [1, 0, 2, 0]
        await until(lambda: recorded.leads)
        assert recorded.terms == [1, 0, 2, 0, 41]


async def test_a_process_that_was_stopped_follows_before_anything_else(
    api: FakeKubernetes,
) -> None:
    recorded = candidate(URL, 1)
    clock = recorded.campaign._clock
    async with running(recorded):
        await until(lambda: recorded.terms == [1])
        recorded.campaign._clock = lambda: clock() + 60.0
        # No other callback of the event loop has run since.
        assert not recorded.campaign.leads()
        assert recorded.terms == [1, 0]
        await until(lambda: recorded.terms == [1, 0, 2])


async def test_what_the_service_account_lacks_is_said_once(
    api: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    recorded = candidate(URL, 1)
    api.leases.refuse = 403
    async with running(recorded):
        await until(lambda: "Role in namespace llm to get leases" in recorded.campaign.complaint)
        await asyncio.sleep(3 * QUICK.retry_s)
        assert len([r for r in caplog.records if "is unavailable" in r.message]) == 1
        api.leases.refuse = 0
        await until(lambda: recorded.terms == [1])
        assert recorded.campaign.complaint == ""
        assert "responds again" in caplog.text


async def test_a_namespace_that_is_not_there_is_named(api: FakeKubernetes) -> None:
    recorded = candidate("k8s://elsewhere/sglang-sbs", 1)
    async with running(recorded):
        await until(lambda: 'namespaces "elsewhere" not found' in recorded.campaign.complaint)


@pytest.mark.parametrize(
    "spec",
    [{"leaseTransitions": "many"}, {"leaseTransitions": -1}, {"leaseDurationSeconds": "long"}],
)
async def test_what_is_no_lease_is_a_complaint(
    api: FakeKubernetes, store: KubernetesLease, spec: dict[str, object]
) -> None:
    await store.take(await store.read(), "me#1", 1)
    api.leases.kept[KEY]["spec"].update(spec)
    with pytest.raises(StoreError):
        await store.read()


async def test_a_lease_that_says_that_it_lasts_for_ever_does_not(
    api: FakeKubernetes, store: KubernetesLease
) -> None:
    await store.take(await store.read(), "me#1", 1)
    api.leases.kept[KEY]["spec"]["leaseDurationSeconds"] = 10**9
    assert (await store.read()).lasts_s == 60.0


async def test_no_way_to_an_api_server_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere/kubeconfig")
    recorded = candidate(URL, 1)
    with pytest.raises(ValueError, match="--sbs-election: no access to the Kubernetes API"):
        await recorded.campaign.run(recorded.terms.append, lambda: recorded.terms.append(0))
    assert recorded.terms == []


async def leader_and_other(
    first: RecordedCampaign, second: RecordedCampaign
) -> tuple[RecordedCampaign, RecordedCampaign]:
    await until(lambda: first.leads or second.leads)
    return (first, second) if first.leads else (second, first)


def address(recorded: RecordedCampaign, first: RecordedCampaign) -> str:
    return "tcp://10.0.0.1:7700" if recorded is first else "tcp://10.0.0.2:7700"
