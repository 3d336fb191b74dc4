"""``tools.record_deployments`` keeps what the table of features is made from, and nothing else."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from doctor_rig import rig

from sglang_sbs.doctor.examine import gather
from sglang_sbs.doctor.features import feature_rows
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from tools import feature_deployments, record_deployments


async def test_the_same_is_judged_of_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_deployments, "RECORDS", tmp_path)
    async with rig() as r:
        argv = ["--host", "127.0.0.1", "--port", "0", "--sbs-endforward-bind", "none"]
        argv += ["--prometheus-host", "127.0.0.1", "--prometheus-port", "0"]
        for engine, port in zip(r.prefill, r.bootstrap_ports, strict=True):
            argv += ["--prefill", engine.url, str(port)]
        server = RouterServer(parse_flags([*argv, "--decode", r.decode.url]))
        await server.start()
        try:
            words = ["--router", f"http://127.0.0.1:{server.port}", "--wait", "0.1"]
            facts = await gather(parse_options(words))
        finally:
            await server.stop(grace_s=0.0)
    record_deployments.keep("a kind, of two words", facts)
    text = (tmp_path / "a-kind-of-two-words.json").read_text()
    restored = feature_deployments.recorded(orjson.loads(text))
    states = {row.id: row.state for row in feature_rows(facts)}
    assert {row.id: row.state for row in feature_rows(restored)} == states
    assert len(set(states.values())) > 1, "one that is always the same proves nothing"
    assert r.decode.url not in text
    assert "connection_mode" not in text, "a field of /workers that no row reads"


def test_every_recorded_column_can_be_recorded_again() -> None:
    assert tuple(record_deployments.KINDS) == feature_deployments.RECORDED
