"""When a scheduler that just started stands for election."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from harness.until import until

from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.processes.scheduler_process import SchedulerProcess
from tools.stand_ins.kubernetes_server import FakeKubernetes
from tools.stand_ins.mock_engine import MockEngine


async def test_no_scheduler_leads_before_the_workers_are_probed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    api, prefill, decode = FakeKubernetes(), MockEngine("prefill"), MockEngine("decode")
    for server in (api, prefill, decode):
        await server.start()
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path)))
    decode.freeze()
    flags = ["--sbs-role", "scheduler", "--sbs-listen", "tcp://127.0.0.1:*"]
    flags += ["--sbs-advertise", "tcp://127.0.0.1:7700", "--sbs-election", "k8s://llm/sbs"]
    flags += ["--pd-disaggregation", "--prefill", prefill.url, "8998", "--decode", decode.url]
    flags += ["--prometheus-host", "127.0.0.1", "--prometheus-port", "0"]
    process = SchedulerProcess(parse_flags([*flags, "--sbs-endforward-bind", "none"]))
    await process.start()
    try:
        await until(lambda: prefill.hits.get("/server_info"))
        await asyncio.sleep(0.3)  # in which it would have stood
        assert not process.lead.active and not api.leases.kept
        decode.thaw()
        await until(lambda: process.lead.active)
        assert process.lead.leader == "tcp://127.0.0.1:7700"
    finally:
        await process.stop()
        for server in (api, prefill, decode):
            await server.stop()
    # Given back, so that another one leads at once.
    assert api.leases.kept["llm", "sbs"]["spec"]["holderIdentity"] == ""
