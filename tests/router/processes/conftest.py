"""The setup of tests of the link between front ends and a scheduler: worlds without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from link_harness import World
from many_schedulers import Several

from sglang_sbs.router.processes.leading import scheduler_choice as choice_module


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    for front_end in made.front_ends:
        front_end.link.close()
    made.crash()


@pytest.fixture
async def several(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Several]:
    monkeypatch.setattr(choice_module, "LOOK_EVERY_S", 0.03)
    monkeypatch.setattr(choice_module, "FRESH_S", 0.2)
    monkeypatch.setattr(choice_module, "AGAIN_S", 0.05)
    made = Several()
    yield made
    made.close()
