"""The setup of tests of the link between front ends and a scheduler: worlds without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from link_harness import World
from many_schedulers import Several

from sglang_sbs.router.processes.leading.scheduler_choice import ChoiceTimes


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    for front_end in made.front_ends:
        front_end.link.close()
    made.crash()


@pytest.fixture
async def several() -> AsyncIterator[Several]:
    made = Several(ChoiceTimes(look_every_s=0.03, fresh_s=0.2, again_s=0.05))
    yield made
    made.close()
