"""The doctor on real SGLang engines: a healthy cluster, and five broken ones.

One cluster of two prefill engines and a decode engine serves for all: the second prefill engine has
no plugin, and is only given to the doctor where that is the defect.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
from cluster_requests import STARTUP_TIMEOUT_S, cluster_options

from benchmarks.breakable import BreakableCluster
from benchmarks.demo.runs import RouterPorts, running_router
from sglang_sbs.cluster.plan import PORTS_PER_INSTANCE, InstancePlan, plan_cluster
from sglang_sbs.cluster.ports import free_port_blocks
from tools.cpu_engine.engines import CpuEngines
from tools.cpu_engine.virtual_gpu import VirtualGpuCost

pytestmark = [pytest.mark.cluster, pytest.mark.asyncio(loop_scope="session")]

CONFLICTING = (
    *("--load-balance-method", "round_robin", "--enable-prefill-delayer"),
    *("--page-size", "16", "--chunked-prefill-size", "512"),
)
NOT_BETTER_ON_CPU = {"cache.approximate", "security.no-key", "latency.jitter"}
"""Notes that are true of this cluster: no KV events, no keys, two cores for six ranks."""


@dataclass
class Report:
    """The doctor's output."""

    code: int
    text: str
    findings: list[dict[str, str]]

    def ids(self, url: str | None = None) -> set[str]:
        return {f["id"] for f in self.findings if url in (None, f["subject"])}

    def worse_than_notes(self) -> set[str]:
        return {f["id"] for f in self.findings if f["severity"] in ("warning", "error")}


@dataclass
class Patient:
    cluster: BreakableCluster
    ports: RouterPorts
    folder: Path

    @property
    def prefill(self) -> InstancePlan:
        return self.cluster.instances[0]

    @property
    def second(self) -> InstancePlan:
        return self.cluster.instances[1]

    @property
    def decode(self) -> InstancePlan:
        return self.cluster.instances[2]

    async def features(self, *words: str) -> dict[str, str]:
        """State of each row of ``--features``; its text stays in the session's folder."""
        path = self.folder / "features.json"
        command = [sys.executable, "-m", "sglang_sbs.cli", "doctor", "--features", *words]
        process = await asyncio.create_subprocess_exec(
            *(*command, "--json", str(path)),
            env={**os.environ, "COLUMNS": "110"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 120)
        assert process.returncode == 0, err.decode()
        (self.folder / "features.txt").write_bytes(out)
        report = orjson.loads(path.read_bytes())
        return {row["id"]: row["state"] for row in report["features"]}

    def flags(self, *prefill: InstancePlan) -> list[str]:
        words = ["--decode", self.decode.url]
        for instance in prefill or (self.prefill,):
            words += ["--prefill", instance.url, str(instance.bootstrap_port)]
        return words

    async def doctor(self, name: str, *words: str) -> Report:
        """Run the command; its text stays in the session's folder as NAME.txt."""
        path = self.folder / f"{name}.json"
        command = [sys.executable, "-m", "sglang_sbs.cli", "doctor", *words, "--json", str(path)]
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, "COLUMNS": "110"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await asyncio.wait_for(process.communicate(), 120)
        assert b"Traceback" not in err, err.decode()
        (self.folder / f"{name}.txt").write_bytes(out)
        report = orjson.loads(path.read_bytes())
        assert report["exit_code"] == process.returncode
        return Report(report["exit_code"], out.decode(), report["findings"])


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def patient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Patient]:
    blocks = free_port_blocks(PORTS_PER_INSTANCE)
    first = next(blocks)
    ports = RouterPorts(http=first, endforward=first + 1, prometheus=first + 2)
    quiet = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS")}
    endpoint = f"tcp://127.0.0.1:{ports.endforward}"
    options = cluster_options(
        tmp_path_factory,
        "doctor",
        cpu=CpuEngines(VirtualGpuCost()),
        prefill_instances=2,
        environment=quiet | {"SGLANG_SBS_ROUTERS": endpoint},
    )
    plan = plan_cluster(options, blocks)
    prefill, second, decode = plan.instances
    without = {k: v for k, v in second.environment.items() if k != "SGLANG_SBS_ROUTERS"}
    second = dataclasses.replace(second, environment=without)
    plan = dataclasses.replace(plan, instances=(prefill, second, decode))
    async with BreakableCluster(plan, STARTUP_TIMEOUT_S) as cluster:
        yield Patient(cluster, ports, options.log_dir)


async def test_a_healthy_cluster(patient: Patient) -> None:
    report = await patient.doctor("healthy", *patient.flags(), "--probe", "--strict")
    assert report.worse_than_notes() == set(), report.text
    assert report.code == 0
    notes = {f["id"] for f in report.findings if f["severity"] == "note"}
    assert notes <= NOT_BETTER_ON_CPU
    assert {"bootstrap.ok", "endforward.ok", "plugin.ok"} <= report.ids(patient.prefill.url)
    assert {"endforward.ok", "plugin.ok", "room.ok"} <= report.ids(patient.decode.url)
    assert {"probe.ok", "pair.ok", "version.ok"} <= report.ids()


async def test_a_running_router_is_asked_what_arrives(patient: Patient) -> None:
    instances = (patient.prefill, patient.decode)
    async with running_router(instances, patient.ports, (), patient.folder) as url:
        report = await patient.doctor("router", "--router", url)
        # Engines connect to a new router within 2 s, later on a busy machine.
        async with asyncio.timeout(60):
            while report.worse_than_notes():
                report = await patient.doctor("router", "--router", url)
        assert "endforward.ok" in report.ids(patient.prefill.url)
        assert "router.ok" in report.ids()
        states = await patient.features("--router", url)
        on = {name for name, state in states.items() if state == "on"}
        assert {"batches", "endforward", "gang-gate", "aborts", "decode-caps", "barrier"} <= on
        assert (states["cache"], states["nodes"]) == ("partly", "off")
        busy = await patient.doctor("busy", *patient.flags())
    assert "endforward.port-busy" in busy.ids()
    assert busy.worse_than_notes() == set(), busy.text


async def test_broken_1_the_plugin_is_not_loaded_on_one_engine(patient: Patient) -> None:
    report = await patient.doctor("plugin", *patient.flags(patient.prefill, patient.second))
    assert report.worse_than_notes() == {"plugin.absent"}, report.text
    assert "plugin.absent" in report.ids(patient.second.url)
    assert "endforward.ok" in report.ids(patient.prefill.url)


async def test_broken_2_a_wrong_bootstrap_port(patient: Patient) -> None:
    words = ["--prefill", patient.prefill.url, "8998", "--decode", patient.decode.url]
    report = await patient.doctor("bootstrap", *words)
    assert report.code == 1
    assert report.worse_than_notes() == {"bootstrap.wrong-port"}, report.text
    wrong = next(f for f in report.findings if f["id"] == "bootstrap.wrong-port")
    assert str(patient.prefill.bootstrap_port) in wrong["change"]


async def test_broken_3_endforward_with_a_key_on_one_side(patient: Patient) -> None:
    key = patient.folder / "key"
    key.write_text("k" * 40)
    key.chmod(0o600)
    report = await patient.doctor("key", *patient.flags(), "--sbs-endforward-key-file", str(key))
    assert report.code == 1
    assert report.worse_than_notes() == {"endforward.key"}, report.text
    # Having looked has done no harm.
    report = await patient.doctor("after", *patient.flags())
    assert report.worse_than_notes() == set(), report.text


async def test_broken_4_conflicting_and_mismatched_flags(patient: Patient) -> None:
    await patient.cluster.kill(patient.second.name)
    await patient.cluster.start_instance(patient.second.name, CONFLICTING)
    report = await patient.doctor("flags", *patient.flags(patient.prefill, patient.second))
    assert report.code == 1
    assert {"flags.load-balance", "flags.prefill-delayer", "limits.chunk-small"} <= report.ids(
        patient.second.url
    )
    assert {"pair.page-size", "limits.uneven"} <= report.ids("cluster"), report.text


async def test_broken_5_a_dead_decode_engine(patient: Patient) -> None:
    await patient.cluster.kill(patient.decode.name)
    report = await patient.doctor("dead", *patient.flags())
    assert report.code == 1
    assert report.worse_than_notes() == {"reach.unreachable", "reach.no-pair"}, report.text
    assert "reach.unreachable" in report.ids(patient.decode.url)
