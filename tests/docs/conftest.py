"""The files and policies that a reader of the documentation has at hand."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import msgspec
import pytest

from sglang_sbs.scheduling import RequestArrived, SchedulerConfig, policy_registry
from sglang_sbs.scheduling.eventlog import EventLogWriter
from sglang_sbs.simulator.cluster.cost import PassCost, save_cost
from sglang_sbs.simulator.experiments import sweep

ROOT = Path(__file__).parents[2]


@pytest.fixture
def readers_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files and policies that commands of the documentation take for granted."""
    monkeypatch.chdir(tmp_path)
    example = runpy.run_path(str(ROOT / "examples" / "own_policy" / "example_policy.py"))["POLICY"]
    monkeypatch.setitem(policy_registry._specs, example.name, example)
    monkeypatch.setitem(sweep.POLICY_CONFIGS, example.name, {"policy": example.name})
    for name in ("key", "endforward.key"):
        (tmp_path / name).write_text("0" * 64)
    rows = [(0.1 * i, 100 + i, 20) for i in range(100)]
    mooncake = "".join(
        json.dumps({"timestamp": round(t * 1e3), "input_length": i, "output_length": o}) + "\n"
        for t, i, o in rows
    )
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
        f"2023-11-16 18:17:{t:010.7f},{i},{o}\n" for t, i, o in rows
    )
    for name in ("requests.jsonl", "conversation_trace.jsonl", "conversation.jsonl"):
        (tmp_path / name).write_text(mooncake)
    for name, observed in (("router.events", False), ("traffic.events", True)):
        log = EventLogWriter(tmp_path / name, SchedulerConfig(), observed=observed)
        for second in range(30):
            log.write(second, RequestArrived(rid=str(second), prompt_tokens=900), [])
        log.close()
    for name in ("requests.csv", "AzureLLMInferenceTrace_code.csv", "azure-code.csv"):
        (tmp_path / name).write_text(azure)
    cost = PassCost(fixed_s=0.1, mean_s=1e-5)
    save_cost(cost, tmp_path / "measured.json")
    fitted = {"cost": msgspec.to_builtins(cost), "virtual_gpu": {"prefill_base_s": 0.1}}
    (tmp_path / "cost.json").write_text(json.dumps(fitted))
    return tmp_path
