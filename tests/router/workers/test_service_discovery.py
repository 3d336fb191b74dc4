"""Workers found as Kubernetes pods: against an API server that speaks the list/watch protocol."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from router_harness import FakeScheduler, until

from sglang_sbs.router.options.config import (
    BOOTSTRAP_PORT_ANNOTATION,
    LWS_WORKER_INDEX,
    DiscoveryConfig,
)
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.processes.front_end_sessions import Hub
from sglang_sbs.router.processes.leading.lead import Lead, Unopposed
from sglang_sbs.router.processes.messages import VERSION, Hello
from sglang_sbs.router.processes.mirrored_registry import state_of
from sglang_sbs.router.server import RouterServer
from sglang_sbs.router.workers.kubernetes_watch import PodDiscovery, WatchTiming
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole
from tools.stand_ins.kubernetes_server import FakeKubernetes, pod
from tools.stand_ins.mock_engine import MockEngine, Rooms

P = {"app": "sglang", "component": "prefill"}
D = {"app": "sglang", "component": "decode"}
CONFIG = DiscoveryConfig(
    prefill_selector="app=sglang,component=prefill",
    decode_selector="app=sglang,component=decode",
    port=9,
    namespace="llm",
)
FLAGS = (
    *("--service-discovery", "--prefill-selector", "app=sglang", "component=prefill"),
    *("--decode-selector", "app=sglang", "component=decode"),
)
QUICK = WatchTiming(first_pause_s=0.01, longest_pause_s=0.05)


class Members:
    """The registry as the router changes it, without looking at the workers."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.log: list[str] = []

    def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        self.log.append(f"+{url}")
        return self.registry.add(url, role, bootstrap_port)

    def remove_worker(self, worker: Worker) -> None:
        self.log.append(f"-{worker.url}")
        self.registry.remove(worker)

    def seen(self) -> dict[str, tuple[str, int | None]]:
        return {
            worker.url.removeprefix("http://"): (worker.role, worker.configured_bootstrap_port)
            for worker in self.registry
        }


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeKubernetes]:
    fake = FakeKubernetes()
    await fake.start()
    monkeypatch.setenv("KUBECONFIG", str(fake.kubeconfig(tmp_path)))
    yield fake
    await fake.stop()


@asynccontextmanager
async def following(
    members: Members, config: DiscoveryConfig = CONFIG, timing: WatchTiming = QUICK
) -> AsyncIterator[PodDiscovery]:
    found = PodDiscovery(config, members, timing)
    await found.start()
    try:
        yield found
    finally:
        await found.close()


def metric(found: PodDiscovery, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in found.families()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


# What is a worker --------------------------------------------------------------------------------


async def test_pods_become_workers_and_cease_to_be(api: FakeKubernetes) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P, annotations={BOOTSTRAP_PORT_ANNOTATION: "8998"}))
    await api.put(pod("web", "127.0.0.9", labels={"app": "web"}))
    await api.put(pod("p1", "127.0.0.3", labels=P, namespace="elsewhere"))
    async with following(members) as found:
        await until(lambda: members.seen() == {"127.0.0.2:9": ("prefill", 8998)})
        await until(lambda: api.watches == 2)
        await api.put(
            pod("d0", "127.0.0.4", labels=D, annotations={BOOTSTRAP_PORT_ANNOTATION: "1"})
        )
        await until(lambda: "127.0.0.4:9" in members.seen())
        assert members.seen()["127.0.0.4:9"] == ("decode", None)
        assert metric(found, "smg_discovery_workers_discovered") == 2
        await api.delete("p0")
        await until(lambda: list(members.seen()) == ["127.0.0.4:9"])
        assert metric(found, "smg_discovery_registrations_total", result="success") == 2
        assert metric(found, "smg_discovery_deregistrations_total") == 1
    (worker,) = members.registry
    assert worker.labels["pod"] == "llm/d0"
    assert worker.labels["discovered-by"] == "kubernetes"


async def test_only_ready_running_pods_that_are_not_being_deleted_are_used(
    api: FakeKubernetes,
) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P, ready=False))
    await api.put(pod("p1", "127.0.0.3", labels=P, phase="Succeeded"))
    await api.put(pod("p2", "", labels=P, ready=False, phase="Pending"))
    async with following(members) as found:
        await until(lambda: metric(found, "sbs_discovery_current") == 2)
        assert members.seen() == {}
        await api.set_ready("p0", True)
        await until(lambda: list(members.seen()) == ["127.0.0.2:9"])
        await api.set_ready("p0", False)
        await until(lambda: members.seen() == {})
        await api.set_ready("p0", True)
        await until(lambda: list(members.seen()) == ["127.0.0.2:9"])
        await api.change("p0", deletionTimestamp="2026-01-01T00:00:10Z")
        await until(lambda: members.seen() == {})
    assert members.log == ["+http://127.0.0.2:9", "-http://127.0.0.2:9"] * 2


async def test_of_a_multi_node_instance_only_the_leader_counts(api: FakeKubernetes) -> None:
    members = Members()
    for node in range(4):
        labels = {**P, LWS_WORKER_INDEX: str(node)}
        await api.put(pod(f"p-{node}", f"127.0.0.{node + 2}", labels=labels))
    async with following(members) as found:
        await until(lambda: metric(found, "sbs_discovery_current") == 2)
        assert list(members.seen()) == ["127.0.0.2:9"]


async def test_a_new_pod_with_the_address_of_an_old_one_is_another_worker(
    api: FakeKubernetes,
) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P))
    async with following(members):
        await until(lambda: len(members.registry) == 1)
        (first,) = members.registry
        # The younger one is seen before the end of the older one, which must not take it along.
        await api.put(pod("p1", "127.0.0.2", labels=P, created="2026-01-02T00:00:00Z"))
        await until(lambda: members.log[-2:] == ["-http://127.0.0.2:9", "+http://127.0.0.2:9"])
        await api.delete("p0")
        await api.put(pod("p2", "127.0.0.3", labels=P))
        await until(lambda: "127.0.0.3:9" in members.seen())
        second = members.registry.get("http://127.0.0.2:9")
        assert second is not None and second is not first
        assert second.labels["pod"] == "llm/p1"


async def test_an_address_may_go_over_to_the_other_role(api: FakeKubernetes) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P))
    async with following(members):
        await until(lambda: members.seen() == {"127.0.0.2:9": ("prefill", None)})
        await api.change("p0", labels=D)
        await until(lambda: members.seen() == {"127.0.0.2:9": ("decode", None)})
        await api.change("p0", labels={"app": "sglang"})
        await until(lambda: members.seen() == {})


async def test_a_pod_that_both_selectors_match_is_a_prefill_pod(api: FakeKubernetes) -> None:
    members = Members()
    config = DiscoveryConfig("app=sglang,component=prefill", "app=sglang", 9, "llm")
    await api.put(pod("p0", "127.0.0.2", labels=P))
    await api.put(pod("d0", "127.0.0.3", labels=D))
    async with following(members, config) as found:
        await until(lambda: metric(found, "sbs_discovery_current") == 2)
        assert members.seen() == {"127.0.0.2:9": ("prefill", None), "127.0.0.3:9": ("decode", None)}
        assert members.log.count("+http://127.0.0.2:9") <= 2


async def test_all_namespaces_without_a_name_for_one(api: FakeKubernetes) -> None:
    members = Members()
    config = DiscoveryConfig("app=sglang,component=prefill", port=9)
    await api.put(pod("p0", "127.0.0.2", labels=P, namespace="a"))
    await api.put(pod("p1", "127.0.0.3", labels=P, namespace="b"))
    async with following(members, config):
        await until(lambda: len(members.registry) == 2)
    assert {query["path"] for query in api.requests} == {"/api/v1/pods"}


# Other people's workers --------------------------------------------------------------------------


async def test_workers_of_flags_are_left_alone(api: FakeKubernetes) -> None:
    members = Members()
    members.add_worker("http://127.0.0.2:9", "prefill", 1234)
    members.add_worker("http://127.0.0.7:9", "decode", None)
    await api.put(pod("p0", "127.0.0.2", labels=P, annotations={BOOTSTRAP_PORT_ANNOTATION: "8998"}))
    async with following(members):
        await until(lambda: api.watches == 2)
        await api.delete("p0")
        await api.put(pod("p1", "127.0.0.3", labels=P))
        await until(lambda: "127.0.0.3:9" in members.seen())
    assert members.seen()["127.0.0.2:9"] == ("prefill", 1234)
    assert "127.0.0.7:9" in members.seen()


async def test_a_worker_that_somebody_removed_stays_away_until_its_pod_changes(
    api: FakeKubernetes,
) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P))
    async with following(members):
        await until(lambda: len(members.registry) == 1)
        members.remove_worker(next(iter(members.registry)))
        await api.put(pod("p1", "127.0.0.3", labels=P))
        await until(lambda: "127.0.0.3:9" in members.seen())
        assert list(members.seen()) == ["127.0.0.3:9"]
        await api.set_ready("p0", False)
        await api.set_ready("p0", True)
        await until(lambda: len(members.registry) == 2)


async def test_workers_of_the_process_before_this_one_are_taken_over(api: FakeKubernetes) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P))
    await api.put(pod("p1", "127.0.0.3", labels=P))
    async with following(members):
        await until(lambda: len(members.registry) == 2)
    kept = members.registry.get("http://127.0.0.2:9")
    await api.delete("p1")
    del members.log[:]
    async with following(members):
        await until(lambda: len(members.registry) == 1)
    assert members.log == ["-http://127.0.0.3:9"]
    assert list(members.registry) == [kept]


async def test_a_scheduler_that_restarted_believes_the_pods_not_its_front_ends(
    api: FakeKubernetes,
) -> None:
    """A front end's view of the workers is outdated: pods have come and gone since."""
    before = Members()
    await api.put(pod("gone", "127.0.0.2", labels=P))
    await api.put(pod("stays", "127.0.0.3", labels=P))
    async with following(before):
        await until(lambda: len(before.registry) == 2)
    before.add_worker("http://127.0.0.9:9", "decode", None)
    states = [state_of(worker, 0.0) for worker in before.registry]

    await api.delete("gone")
    await api.put(pod("new", "127.0.0.4", labels=P))
    members = Members()
    timing = WatchTiming(stream_s=1, first_pause_s=0.01)
    async with following(members, timing=timing):
        await until(lambda: len(members.registry) == 2)
        unopposed = Unopposed()
        hub = Hub(members, lambda identity, message: True, FakeScheduler(), Lead(unopposed))
        unopposed.begin(hub.lead, hub.follow)
        hub.receive(
            b"f", Hello(version=VERSION, front_end="f", name="f", scheduler="old", workers=states)
        )
        assert set(members.seen()) == {f"127.0.0.{n}:9" for n in (2, 3, 4, 9)}
        await until(lambda: set(members.seen()) == {f"127.0.0.{n}:9" for n in (3, 4, 9)})
        hub.close()
        hub.pump.close()
    stays = [m.registry.get("http://127.0.0.3:9") for m in (before, members)]
    assert stays[0] is not None and stays[1] is not None
    assert stays[0].id == stays[1].id


# The protocol ------------------------------------------------------------------------------------


async def test_a_watch_goes_on_where_the_last_one_ended(api: FakeKubernetes) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P))
    async with following(members, timing=WatchTiming(stream_s=1, first_pause_s=0.01)) as found:
        await until(lambda: sum("watch" in query for query in api.requests) >= 6)
        await api.put(pod("p1", "127.0.0.3", labels=P))
        await until(lambda: len(members.registry) == 2)
        assert len(api.lists()) == 2  # one per role, at the start
        assert metric(found, "sbs_discovery_errors_total") == 0


async def test_after_410_gone_pods_are_listed_anew(
    api: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    members = Members()
    caplog.set_level(logging.INFO)
    await api.put(pod("p0", "127.0.0.2", labels=P))
    async with following(members, timing=WatchTiming(stream_s=1, first_pause_s=0.01)) as found:
        await until(lambda: api.watches == 2)
        api.compact()  # the streams that are open end in a second, and cannot be taken up again
        await until(lambda: metric(found, "sbs_discovery_lists_total") == 4)
        await api.delete("p0")
        await api.put(pod("p1", "127.0.0.3", labels=P))
        await until(lambda: list(members.seen()) == ["127.0.0.3:9"])
    assert "too old" in caplog.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_what_happened_while_the_connection_was_broken_is_found_out(
    api: FakeKubernetes,
) -> None:
    members = Members()
    for number in range(3):
        await api.put(pod(f"p{number}", f"127.0.0.{number + 2}", labels=P))
    async with following(members) as found:
        await until(lambda: api.watches == 2 and len(members.registry) == 3)
        await api.stop()
        await until(lambda: metric(found, "sbs_discovery_current") == 0)
        await api.delete("p0")
        await api.put(pod("p3", "127.0.0.5", labels=P))
        assert len(members.registry) == 3  # nothing is known, so nothing changes
        await api.start()
        await until(lambda: set(members.seen()) == {f"127.0.0.{n}:9" for n in (3, 4, 5)})
        await until(lambda: metric(found, "sbs_discovery_current") == 2)
        assert members.log.count("+http://127.0.0.3:9") == 1  # who stayed was not touched
        assert metric(found, "sbs_discovery_errors_total") >= 2


async def test_a_connection_cut_again_and_again_is_made_again(api: FakeKubernetes) -> None:
    members = Members()
    async with following(members):
        for number in range(4):
            await until(lambda: api.watches == 2)
            api.cut_watches()
            await api.put(pod(f"p{number}", f"127.0.0.{number + 2}", labels=P))
            await until(lambda expected=number + 1: len(members.registry) == expected)


async def test_a_watch_on_a_dead_connection_is_given_up(api: FakeKubernetes) -> None:
    members = Members()
    api.frozen = True
    await api.put(pod("p0", "127.0.0.2", labels=P))
    timing = WatchTiming(stream_s=1, silent_s=0.1, first_pause_s=0.01)
    async with following(members, timing=timing) as found:
        await until(lambda: api.watches == 2)
        await api.put(pod("p1", "127.0.0.3", labels=P))
        await until(lambda: len(members.registry) == 2)  # no event came, so it was listed again
        assert metric(found, "sbs_discovery_errors_total") >= 1


async def test_a_list_that_fails_takes_no_worker_away(api: FakeKubernetes) -> None:
    members = Members()
    await api.put(pod("p0", "127.0.0.2", labels=P))
    async with following(members) as found:
        await until(lambda: api.watches == 2 and len(members.registry) == 1)
        api.fail_lists = 6
        api.cut_watches()
        await until(lambda: api.fail_lists == 0)
        await until(lambda: metric(found, "sbs_discovery_current") == 2)
    assert members.log == ["+http://127.0.0.2:9"]


async def test_long_lists_come_in_pages(api: FakeKubernetes) -> None:
    members = Members()
    api.page_size = 2
    for number in range(5):
        await api.put(pod(f"p{number}", f"127.0.0.{number + 2}", labels=P))
    async with following(members):
        await until(lambda: len(members.registry) == 5)
    lists = [query for query in api.lists() if "prefill" in query["labelSelector"]]
    assert [query.get("continue") for query in lists] == [None, "2", "4"]
    assert {query["limit"] for query in lists} == {"500"}


async def test_a_missing_permission_is_explained_once(
    api: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    members = Members()
    api.refuse = 403
    async with following(members, DiscoveryConfig("a=b", port=9, namespace="llm")) as found:
        await until(lambda: metric(found, "sbs_discovery_errors_total") >= 4)
        api.refuse = 0
        await until(lambda: metric(found, "sbs_discovery_current") == 1)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert 'cannot list resource "pods"' in warning
    assert "a Role in namespace llm to get, list and watch pods" in warning


# The whole router --------------------------------------------------------------------------------


@asynccontextmanager
async def router(*flags: str) -> AsyncIterator[tuple[RouterServer, aiohttp.ClientSession, str]]:
    options = parse_flags(
        [
            *("--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1"),
            *("--prometheus-port", "0", "--sbs-endforward-bind", "tcp://127.0.0.1:*"),
            *flags,
        ]
    )
    server = RouterServer(options, FakeScheduler())
    await server.start()
    try:
        async with aiohttp.ClientSession() as client:
            yield server, client, f"http://127.0.0.1:{server.port}"
    finally:
        await server.stop(grace_s=0.0)


async def test_a_discovered_instance_serves_until_its_pod_is_not_ready(
    api: FakeKubernetes,
) -> None:
    rooms = Rooms()
    prefill = MockEngine("prefill", dp_size=2, rooms=rooms)
    decode = MockEngine("decode", dp_size=2, rooms=rooms)
    for engine in (prefill, decode):
        await engine.start()
    port = prefill.url.rpartition(":")[2]
    flags = (
        *("--service-discovery", "--prefill-selector", "app=sglang component=prefill"),
        *("--service-discovery-port", port, "--service-discovery-namespace", "llm"),
        *("--decode", decode.url),
    )
    try:
        async with router(*flags) as (server, client, url):

            async def generate() -> int:
                async with client.post(f"{url}/generate", json={"text": "x"}) as response:
                    return response.status

            assert await generate() == 503
            await api.put(
                pod("p0", "127.0.0.1", labels=P, annotations={BOOTSTRAP_PORT_ANNOTATION: "9000"})
            )
            await until(lambda: server.registry.ready)
            assert await generate() == 200
            legs = [r for r in decode.requests if r.path == "/generate"]
            assert [leg.body["bootstrap_port"] for leg in legs] == [9000]
            async with client.get(f"{url}/workers") as response:
                (shown,) = [
                    w for w in (await response.json())["workers"] if w["worker_type"] == "prefill"
                ]
            assert shown["url"] == prefill.url
            assert shown["metadata"]["pod"] == "llm/p0"
            metrics = f"http://127.0.0.1:{server.prometheus_port}/metrics"
            async with client.get(metrics) as response:
                assert (
                    'smg_discovery_workers_discovered{source="kubernetes"} 1.0'
                    in await response.text()
                )
            await api.set_ready("p0", False)
            await until(lambda: len(server.registry) == 1)
            assert await generate() == 503
            await api.set_ready("p0", True)
            await until(lambda: server.registry.ready)
            assert await generate() == 200
    finally:
        for engine in (prefill, decode):
            await engine.stop()


async def test_without_any_way_to_the_api_the_router_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ValueError, match="--service-discovery: no access to the Kubernetes API"):
        async with router(*FLAGS):
            pass
