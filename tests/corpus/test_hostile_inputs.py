"""Every input of the corpus ends once and as its table says, and harms nobody."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio
from hostile_inputs import KINDS, Input, corpus
from hostile_runner import Stage, stage

pytestmark = pytest.mark.asyncio(loop_scope="module")
INPUTS = [one for kind in KINDS for one in corpus(kind)]


class Stages:
    """A router for each kind: every input also has to leave it fit for the next."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._found: dict[str, Stage] = {}

    async def of(self, kind: str) -> Stage:
        if kind not in self._found:
            self._found[kind] = await self._stack.enter_async_context(stage(kind))
        return self._found[kind]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stages() -> AsyncIterator[Stages]:
    async with AsyncExitStack() as stack:
        yield Stages(stack)


@pytest.mark.parametrize("one", INPUTS, ids=lambda one: f"{one.kind}: {one.name}")
async def test_it_ends_once_and_as_expected(stages: Stages, one: Input) -> None:
    assert await (await stages.of(one.kind)).faults(one) == []
