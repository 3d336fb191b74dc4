"""``sglang-sbs policy``: the switch, and the way back, as one command each."""

from __future__ import annotations

import asyncio
import json
import re
import shlex

import pytest
from router_harness import cluster

from sglang_sbs.cli import main


async def command(*words: str) -> int:
    return await asyncio.to_thread(main, list(words))


async def test_the_policy_verb_shows_switches_and_how_to_go_back(capfd) -> None:
    async with cluster("--policy", "round_robin", real=True) as c:
        assert await command("policy", "--router", c.url) == 0
        shown = capfd.readouterr().out
        assert "policy round_robin, since 20" in shown
        assert "set by command line" in shown
        assert "others: sbs, random" in shown
        assert await command("policy", "sbs", "--router", c.url) == 0
        switched = capfd.readouterr().out
        assert c.server.scheduler.policy.policy == "sbs"
        found = re.search(r"to go back: (sglang-sbs .*)", switched)
        assert found is not None
        back = shlex.split(found[1])
        assert await command(*back[1:]) == 0
        assert c.server.scheduler.policy.policy == "round_robin"
        assert "it was sbs" in capfd.readouterr().out
        assert await command(*back[1:]) == 0
        assert "nothing has changed" in capfd.readouterr().out
        assert await command("policy", "--json", "--router", c.url) == 0
        assert json.loads(capfd.readouterr().out)["switches"] == 2


async def test_a_name_that_there_is_not_and_a_key_that_is_missing(
    capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_SBS_ADMIN_KEY", raising=False)
    async with cluster("--admin-api-key", "secret", real=True) as c:
        assert await command("policy", "eta", "--router", c.url) == 1
        assert "SGLANG_SBS_ADMIN_API_KEY" in capfd.readouterr().err
        monkeypatch.setenv("SGLANG_SBS_ADMIN_KEY", "secret")
        assert await command("policy", "etta", "--router", c.url) == 1
        errors = capfd.readouterr().err
        assert "400 policy must be one of sbs, round_robin" in errors
        assert "not 'etta'" in errors
        assert c.server.scheduler.policy.policy == "sbs"
        assert await command("policy", "eta", "--router", c.url) == 0
        assert c.server.scheduler.policy.policy == "eta"


async def test_the_policy_verb_without_a_router_is_a_clear_error(capfd) -> None:
    assert await command("policy", "eta", "--router", "http://127.0.0.1:9") == 1
    assert "is the router there?" in capfd.readouterr().err
    with pytest.raises(SystemExit) as ended:
        await command("policy", "--router", "127.0.0.1:9")
    assert ended.value.code == 2
