"""How ``--probe`` names a prefill instance to decode."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from sglang_sbs.doctor.facts import EngineFacts
from sglang_sbs.doctor.gathering import pairs
from sglang_sbs.doctor.options import parse_options
from sglang_sbs.router.workers.server_info import SbsBlock, WorkerInfo

BOOTED_S = 1_000_000


def engine(url: str, role: Any, booted_s: int) -> EngineFacts:
    block = SbsBlock(boot_id=url, booted_s=booted_s)
    return EngineFacts(url, role, 8998, info=WorkerInfo(sbs=block))


async def test_every_pair_spells_a_prefill_as_a_router_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A decode instance that is older than the prefill instance decides for all."""
    hosts: dict[str, str] = {}

    async def leg(_post: Any, url: str, side: str, body: dict[str, Any]) -> None:
        if side == "decode":
            hosts[url] = body["bootstrap_host"]

    monkeypatch.setattr(pairs, "_leg", leg)
    prefill = [engine("http://10.0.0.1:30000", "prefill", BOOTED_S)]
    decode = [
        engine("http://10.0.0.2:30000", "decode", BOOTED_S - 60),
        engine("http://10.0.0.3:30000", "decode", BOOTED_S + 60),
    ]
    options = parse_options(["--prefill", prefill[0].url, "--decode", decode[0].url])
    async with aiohttp.ClientSession() as session:
        results = await pairs.probe_pairs(session, options, prefill, decode)
    assert [result.failure for result in results] == ["", ""]
    assert len(hosts) == 2
    assert len(set(hosts.values())) == 1
    assert set(hosts.values()) != {"10.0.0.1"}
