"""The Kubernetes manifests: valid, consistent with each other, and found by the router.

Kinds of Kubernetes itself are checked strictly by its own schemas, custom resources by the ones in
``schemas`` and their pod templates as pods.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from command_lines import EXAMPLES, ROOT, ROUTER, Command, read_by_router, read_by_sglang

from sglang_sbs.router.election import parse_election
from sglang_sbs.router.options.config import LWS_WORKER_INDEX
from sglang_sbs.router.workers.kubernetes_pods import Members
from sglang_sbs.router.workers.kubernetes_watch import PodDiscovery, WatchTiming
from sglang_sbs.router.workers.registry import Registry
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.scheduling.events import InstanceRole

sys.path.insert(0, str(Path(__file__).parents[1] / "router"))

from tools.stand_ins.kubernetes_server import FakeKubernetes, pod

FOLDER = EXAMPLES / "kubernetes"
SCHEMAS = Path(__file__).parent / "schemas"
VERSIONS = ("1.29", "1.33", kubernetes_validate.latest_version())


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def manifests() -> Iterator[tuple[str, dict[str, Any]]]:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    for name in kustomization["resources"]:
        for number, document in enumerate(yaml.safe_load_all((FOLDER / name).read_text())):
            yield f"{name}-{number}", document


MANIFESTS = dict(manifests())


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for document in MANIFESTS.values() if document["kind"] == kind]


def groups() -> dict[str, dict[str, Any]]:
    """The LeaderWorkerSets by name."""
    return {document["metadata"]["name"]: document for document in of_kind("LeaderWorkerSet")}


def templates(group: dict[str, Any]) -> dict[str, dict[str, Any]]:
    template = group["spec"]["leaderWorkerTemplate"]
    return {"leader": template["leaderTemplate"], "worker": template["workerTemplate"]}


def container(template: dict[str, Any]) -> dict[str, Any]:
    (only,) = template["spec"]["containers"]
    return only


def engine_command(template: dict[str, Any]) -> Command:
    """Return the engine's command with LeaderWorkerSet's environment of node 0 of 4."""
    given = {"LWS_LEADER_ADDRESS": "leader", "LWS_GROUP_SIZE": "4", "NODE_RANK": "0"}
    engine = container(template)
    flags = engine["args"]
    for name, value in given.items():
        flags = [flag.replace(f"$({name})", value) for flag in flags]
    assert not any("$(" in flag for flag in flags)
    return Command(engine["command"][2], tuple(flags))


def router() -> dict[str, Any]:
    """The pod template of the routers."""
    (deployment,) = of_kind("Deployment")
    return deployment["spec"]["template"]


def scheduler() -> dict[str, Any]:
    (group,) = of_kind("StatefulSet")
    return group["spec"]["template"]


def options_of(template: dict[str, Any], folder: Path) -> Any:
    """Return the options that the router's own parser reads from the first pod of this kind."""
    values = {"POD_NAMESPACE": "deepseek", "POD_NAME": "sglang-sbs-scheduler-0"}
    flags: list[str] = container(template)["args"]
    for name, value in values.items():
        flags = [flag.replace(f"$({name})", value) for flag in flags]
    for mounted in folder_of_keys(template):
        key = folder / mounted
        key.write_text("0" * 64)
        key.chmod(0o600)
        flags = [flag.replace(f"/etc/sglang-sbs/{mounted}", str(key)) for flag in flags]
    assert not any("$(" in flag or "/etc/" in flag for flag in flags)
    assert "command" not in container(template)  # the image's own (Dockerfile: ENTRYPOINT)
    return read_by_router(Command(ROUTER, tuple(flags)))


def folder_of_keys(template: dict[str, Any]) -> list[str]:
    """Files under /etc/sglang-sbs."""
    (keys,) = [v["secret"] for v in template["spec"]["volumes"] if "secret" in v]
    return [item["path"] for item in keys["items"]]


def test_no_command_line_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {entry["name"]: entry for entry in container(router())["env"]}
    secret = [name for name, entry in given.items() if "secretKeyRef" in entry.get("valueFrom", ())]
    assert secret == ["CONTROL_PLANE_KEY"]
    value = given["SGLANG_SBS_CONTROL_PLANE_API_KEYS"]["value"]
    assert [*given].index(secret[0]) < [*given].index("SGLANG_SBS_CONTROL_PLANE_API_KEYS")
    monkeypatch.setenv("SGLANG_SBS_CONTROL_PLANE_API_KEYS", value.replace(f"$({secret[0]})", "key"))
    (key,) = options_of(router(), tmp_path).control_plane_keys
    assert (key.id, key.role, key.key) == ("ops", "admin", "key")


# Schemas ------------------------------------------------------------------------------------------


def test_every_file_is_used() -> None:
    used = {name.rpartition("-")[0] for name in MANIFESTS}
    assert used | {"kustomization.yaml"} == {path.name for path in FOLDER.iterdir()}
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    jsonschema.validate(kustomization, schema("kustomization"))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", MANIFESTS)
def test_manifests_fit_their_schemas(name: str, version: str) -> None:
    document = MANIFESTS[name]
    custom = {"LeaderWorkerSet": "leaderworkerset", "PodMonitor": "podmonitor"}
    if document["kind"] not in custom:
        kubernetes_validate.validate(document, version, strict=True)
        return
    jsonschema.validate(document, schema(custom[document["kind"]]))
    if document["kind"] == "LeaderWorkerSet":
        for part, template in templates(document).items():
            as_pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": part, **template["metadata"]},
                "spec": template["spec"],
            }
            kubernetes_validate.validate(as_pod, version, strict=True)


def test_a_misspelt_field_is_found() -> None:
    group = json.loads(json.dumps(groups()["prefill"]))
    group["spec"]["leaderWorkerTemplate"]["restartPolcy"] = "None"
    with pytest.raises(jsonschema.ValidationError, match="restartPolcy"):
        jsonschema.validate(group, schema("leaderworkerset"))
    spec = json.loads(json.dumps(templates(groups()["prefill"])["leader"]["spec"]))
    spec["containers"][0]["readinesProbe"] = {}
    as_pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": spec}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(as_pod, VERSIONS[-1], strict=True)


# Engines ------------------------------------------------------------------------------------------


def test_engines_are_the_papers() -> None:
    leaders = {name: templates(group)["leader"] for name, group in groups().items()}
    assert set(leaders) == {"prefill", "decode"}
    commands = [engine_command(leaders[name]) for name in ("prefill", "decode")]
    prefill, decode = read_by_sglang(commands)
    assert (prefill["tp_size"], prefill["attn_dp_size"], prefill["ep_size"]) == (32, 8, 32)
    assert prefill["chunked_prefill_size"] // prefill["attn_dp_size"] == 3072
    assert (prefill["deepep_mode"], decode["deepep_mode"]) == ("normal", "low_latency")
    assert (decode["tp_size"], decode["attn_dp_size"], decode["ep_size"]) == (32, 32, 32)
    assert decode["max_running_requests"] // decode["attn_dp_size"] == 64
    for name, args in (("prefill", prefill), ("decode", decode)):
        assert args["disaggregation_mode"] == name
        assert args["node_rank"] == 0 and args["nnodes"] == 4
        assert args["enable_metrics"] is True
        gpus = int(container(leaders[name])["resources"]["limits"]["nvidia.com/gpu"])
        size = groups()[name]["spec"]["leaderWorkerTemplate"]["size"]
        assert gpus * size == args["tp_size"]
    assert {name: group["spec"]["replicas"] for name, group in groups().items()} == {
        "prefill": 3,
        "decode": 1,
    }


def test_all_pods_of_a_group_run_the_same_command() -> None:
    for group in groups().values():
        leader, worker = map(container, templates(group).values())
        for field in ("image", "command", "args", "env", "resources", "volumeMounts"):
            assert leader[field] == worker[field]
        names = {variable["name"] for variable in leader["env"]}
        assert {"SGLANG_SBS_ROUTERS", "SGLANG_SBS_ENDFORWARD_KEY_FILE", "NODE_RANK"} <= names


def test_the_bootstrap_port_is_annotated_as_it_is_served() -> None:
    leader = templates(groups()["prefill"])["leader"]
    (args,) = read_by_sglang([engine_command(leader)])
    annotated = leader["metadata"]["annotations"]["sglang.ai/bootstrap-port"]
    assert annotated == str(args["disaggregation_bootstrap_port"])
    ports = {port["name"]: port["containerPort"] for port in container(leader)["ports"]}
    assert ports == {"http": args["port"], "bootstrap": int(annotated)}


# The router ---------------------------------------------------------------------------------------


class Seen:
    def __init__(self) -> None:
        self.registry = Registry()

    def add_worker(self, url: str, role: InstanceRole, bootstrap_port: int | None) -> Worker:
        return self.registry.add(url, role, bootstrap_port)

    def remove_worker(self, worker: Worker) -> None:
        self.registry.remove(worker)


async def test_the_router_finds_the_leaders_and_only_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeKubernetes()
    await api.start()
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    address = 1
    expected: dict[str, tuple[str, int | None]] = {}
    for name, group in groups().items():
        for replica in range(group["spec"]["replicas"]):
            for index in range(group["spec"]["leaderWorkerTemplate"]["size"]):
                template = templates(group)["worker" if index else "leader"]
                address += 1
                if index == 0:
                    port = 8998 if name == "prefill" else None
                    expected[f"http://10.0.0.{address}:30000"] = (name, port)
                await api.put(
                    pod(
                        f"{name}-{replica}" + (f"-{index}" if index else ""),
                        f"10.0.0.{address}",
                        namespace="deepseek",
                        labels={**template["metadata"]["labels"], LWS_WORKER_INDEX: str(index)},
                        annotations=template["metadata"].get("annotations"),
                    )
                )
    options = options_of(scheduler(), tmp_path)
    assert options.roles_without_workers == []
    members: Members = Seen()
    found = PodDiscovery(options.discovery, members, WatchTiming(first_pause_s=0.01))
    await found.start()
    try:
        async with asyncio.timeout(20):
            while len(members.registry) < len(expected):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
    finally:
        await found.close()
        await api.stop()
    assert {w.url: (w.role, w.configured_bootstrap_port) for w in members.registry} == expected
    assert {query["path"] for query in api.requests} == {"/api/v1/namespaces/deepseek/pods"}


def test_a_scheduler_may_see_pods_and_hold_its_lease_and_nothing_else() -> None:
    (role,), (binding,), (account,) = map(of_kind, ("Role", "RoleBinding", "ServiceAccount"))
    (elects,) = [flag for flag in container(scheduler())["args"] if "election" in flag]
    lease = elects.rpartition("/")[2]
    leases = {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"]}
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]},
        {**leases, "verbs": ["create"]},
        {**leases, "resourceNames": [lease], "verbs": ["get", "update"]},
    ]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (namespace,) = of_kind("Namespace")
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    assert kustomization["namespace"] == namespace["metadata"]["name"]
    assert binding["subjects"] == [
        {
            "kind": "ServiceAccount",
            "name": account["metadata"]["name"],
            "namespace": namespace["metadata"]["name"],
        }
    ]
    assert scheduler()["spec"]["serviceAccountName"] == account["metadata"]["name"]
    assert router()["spec"]["automountServiceAccountToken"] is False


async def test_the_schedulers_of_the_manifests_elect_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = FakeKubernetes()
    await api.start()
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    several = options_of(scheduler(), tmp_path).several
    url, times = several.election
    election = parse_election(url, several.advertise, times)
    led: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(election.run(led.set_result, lambda: None))
    try:
        async with asyncio.timeout(20):
            assert await led == 1
        assert election.leader == several.advertise
        assert list(api.leases.kept) == [("deepseek", "sglang-sbs")]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await api.stop()


def test_services_lead_to_who_serves(tmp_path: Path) -> None:
    front, back = options_of(router(), tmp_path), options_of(scheduler(), tmp_path)
    ports = {
        name: {port["name"]: port["containerPort"] for port in container(template)["ports"]}
        for name, template in (("router", router()), ("scheduler", scheduler()))
    }
    assert ports == {
        "router": {
            "http": front.port,
            **{f"metrics-{n}": front.prometheus_port + n for n in range(1, front.workers + 1)},
        },
        "scheduler": {
            "front-ends": port_of(back.several.listen),
            "endforward": port_of(back.endforward_bind),
            "metrics": back.prometheus_port,
        },
    }
    services = {service["metadata"]["name"]: service["spec"] for service in of_kind("Service")}
    for service in services.values():
        (to,) = selected({"matchLabels": service["selector"]})
        assert all(port["targetPort"] in ports[to] for port in service["ports"])
    for group in groups().values():
        env = {v["name"]: v.get("value") for v in container(templates(group)["leader"])["env"]}
        scheme, host, port = env["SGLANG_SBS_ROUTERS"].split(":")
        assert scheme == "tcp" and host.removeprefix("//") in services
        service = services[host.removeprefix("//")]
        assert [p["port"] for p in service["ports"]] == [int(port)]
        assert service["publishNotReadyAddresses"] is True
    assert router()["spec"]["terminationGracePeriodSeconds"] > front.shutdown_grace_s


def test_routers_know_every_scheduler_by_the_name_it_gives_itself(tmp_path: Path) -> None:
    front, back = options_of(router(), tmp_path), options_of(scheduler(), tmp_path)
    (group,) = of_kind("StatefulSet")
    name, spec = group["metadata"]["name"], group["spec"]
    service = {s["metadata"]["name"]: s["spec"] for s in of_kind("Service")}[spec["serviceName"]]
    assert service["clusterIP"] == "None" and service["publishNotReadyAddresses"] is True
    assert [p["port"] for p in service["ports"]] == [port_of(back.several.listen)]
    own = back.several.advertise
    assert front.several.schedulers == tuple(
        own.replace(f"{name}-0.", f"{name}-{number}.") for number in range(spec["replicas"])
    )
    assert own == f"tcp://{name}-0.{spec['serviceName']}:{port_of(back.several.listen)}"
    assert front.several.keys == back.several.keys is not None


def test_no_single_pod_or_node_is_all_there_is() -> None:
    for kind in ("Deployment", "StatefulSet"):
        (only,) = of_kind(kind)
        assert only["spec"]["replicas"] == 2
        (spread,) = only["spec"]["template"]["spec"]["topologySpreadConstraints"]
        assert (spread["topologyKey"], spread["maxSkew"]) == ("kubernetes.io/hostname", 1)
        labels = only["spec"]["template"]["metadata"]["labels"]
        assert spread["labelSelector"]["matchLabels"] == only["spec"]["selector"]["matchLabels"]
        assert labels.items() >= spread["labelSelector"]["matchLabels"].items()


def test_readiness_of_a_scheduler_says_whether_it_is_active() -> None:
    probe = container(scheduler())["readinessProbe"]["httpGet"]
    assert (probe["path"], probe["port"]) == ("/readiness", "metrics")


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def test_the_router_runs_as_the_user_of_its_image() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    for template in (router(), scheduler()):
        context = template["spec"]["securityContext"]
        assert context["runAsNonRoot"] is True
        assert f"USER {context['runAsUser']}\n" in dockerfile
    assert 'ENTRYPOINT ["python", "-m", "sglang_sbs.launch_router"]' in dockerfile
    assert "kubernetes" in dockerfile  # the extra that discovery and the Lease need


def test_prometheus_finds_ports_that_exist() -> None:
    found = set()
    for monitor in of_kind("PodMonitor"):
        for name in selected(monitor["spec"]["selector"]):
            found.add(name)
            names = {port["name"] for port in container(pods()[name]).get("ports", ())}
            assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} <= names
    assert found == {"scheduler", "router", "prefill-leader", "decode-leader"}


# The network and drains ---------------------------------------------------------------------------


def pods() -> dict[str, dict[str, Any]]:
    """Every pod template by component and part."""
    found = {"router": router(), "scheduler": scheduler()}
    for name, group in groups().items():
        found |= {f"{name}-{part}": template for part, template in templates(group).items()}
    return found


def selected(selector: dict[str, Any]) -> set[str]:
    """Pods that a label selector takes, as Kubernetes does for ``In``."""
    wanted = selector.get("matchLabels", {}).items()
    expressions = selector.get("matchExpressions", ())
    assert all(expression["operator"] == "In" for expression in expressions)
    return {
        name
        for name, template in pods().items()
        if wanted <= (labels := template["metadata"]["labels"]).items()
        and all(labels.get(expression["key"]) in expression["values"] for expression in expressions)
    }


ENGINE_PODS = {"prefill-leader", "prefill-worker", "decode-leader", "decode-worker"}


def test_only_engines_and_routers_may_write_to_a_scheduler() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    senders = {}
    for name in ("router", "scheduler"):
        policy = policies[f"sglang-sbs-{name}"]
        assert selected(policy["podSelector"]) == {name}
        assert policy["policyTypes"] == ["Ingress"]
        by_port: dict[Any, list[Any]] = {}
        for rule in policy["ingress"]:
            for port in rule["ports"]:
                assert port["protocol"] == "TCP"
                by_port.setdefault(port["port"], []).extend(rule.get("from", [None]))
        assert by_port.keys() == {p["name"] for p in container(pods()[name])["ports"]}
        senders |= by_port
    for port in ("metrics", *(name for name in senders if name.startswith("metrics-"))):
        (scraper,) = senders[port]
        assert scraper.keys() == {"namespaceSelector"}
    for port, expected in (("endforward", ENGINE_PODS), ("front-ends", {"router"})):
        (sender,) = senders[port]
        assert selected(sender["podSelector"]) == expected and len(sender) == 1
    assert senders["http"] == [None]


def test_only_the_cluster_reaches_engines() -> None:
    policies = {policy["metadata"]["name"]: policy["spec"] for policy in of_kind("NetworkPolicy")}
    engines = policies["sglang-engines"]
    assert selected(engines["podSelector"]) == ENGINE_PODS
    cluster, scraper = engines["ingress"]
    assert "ports" not in cluster
    assert selected(cluster["from"][0]["podSelector"]) == ENGINE_PODS | {"router", "scheduler"}
    assert [port["port"] for port in scraper["ports"]] == ["http"]
    assert not any(template["spec"].get("hostNetwork") for template in pods().values())


def test_a_drain_takes_no_more_than_one_of_each() -> None:
    found = of_kind("PodDisruptionBudget")
    budgets = {budget["metadata"]["name"]: budget["spec"] for budget in found}
    assert {name: selected(spec["selector"]) for name, spec in budgets.items()} == {
        "prefill": {"prefill-leader", "prefill-worker"},
        "decode": {"decode-leader", "decode-worker"},
        "sglang-sbs-router": {"router"},
        "sglang-sbs-scheduler": {"scheduler"},
    }
    # The only decode instance stays where it is.
    assert {name for name, spec in budgets.items() if spec["maxUnavailable"] != 1} == {"decode"}
    assert budgets["decode"]["maxUnavailable"] == 0
    assert groups()["decode"]["spec"]["replicas"] == 1


def test_engines_ask_for_cores_and_keep_their_kernels() -> None:
    for name in ENGINE_PODS:
        template = pods()[name]
        resources = container(template)["resources"]
        assert resources["requests"].keys() == {"cpu", "memory"}
        assert "cpu" not in resources["limits"]
        assert template["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"
        (mount,) = [m for m in container(template)["volumeMounts"] if m["name"] == "kernels"]
        assert mount["mountPath"] == "/root/.cache"
        probe = container(template).get("startupProbe")
        if probe is not None:
            (watchdog,) = [w for w in container(template)["args"] if "watchdog" in w]
            waits_s = probe["periodSeconds"] * probe["failureThreshold"]
            assert waits_s >= int(watchdog.partition("=")[2])


def test_images_are_named_in_one_place() -> None:
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    named = {image["name"] for image in kustomization["images"]}
    used = {container(template)["image"] for template in (router(), scheduler())}
    for group in groups().values():
        used |= {container(template)["image"] for template in templates(group).values()}
    assert used == named
