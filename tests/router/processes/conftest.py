"""The setup of tests of the link between front ends and a scheduler: short times, and a world."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from link_harness import World

from sglang_sbs.router.processes import front_end_sessions as hub_module
from sglang_sbs.router.processes import scheduler_link as link_module


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "ALIVE_EVERY_S", 0.01)
    monkeypatch.setattr(link_module, "LOST_AFTER_S", 0.1)
    monkeypatch.setattr(link_module, "CALL_S", 0.2)
    monkeypatch.setattr(hub_module, "TICK_S", 0.01)
    monkeypatch.setattr(hub_module, "SILENT_S", 0.3)
    monkeypatch.setattr(hub_module, "CLUSTER_EVERY_S", 0.05)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    for front_end in made.front_ends:
        front_end.link.close()
    made.crash()
