"""Every input of the corpus ends once and as its table says, and harms nobody."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path

import pytest
import pytest_asyncio
from hostile_inputs import KINDS, Input, corpus
from hostile_mutations import mutations
from hostile_oracles import Reading, difference, read_with_h11
from hostile_runner import Complaints, Stage, stage

SCRIPT = Path(__file__).parents[2] / "scripts" / "fuzz"
INPUTS = [given for kind in KINDS for given in corpus(kind)]


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


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("given", INPUTS, ids=lambda given: f"{given.kind}: {given.name}")
async def test_a_hostile_input_ends_once_and_as_expected(stages: Stages, given: Input) -> None:
    assert await (await stages.of(given.kind)).faults(given) == []


def test_parsers_that_read_differently_are_reported() -> None:
    first, other = ("POST", "/generate", b"x"), ("POST", "/generate", b"y")
    refused, waiting = Reading([first], ended=True), Reading([first])
    assert difference("a", Reading([first]), "b", Reading([other]))
    assert "b waits for more after 1" in difference("a", Reading([first, other]), "b", waiting)
    assert difference("a", waiting, "b", Reading([first, other]))
    assert difference("a", Reading([first, other]), "b", refused) == ""


def test_a_length_that_comes_twice_is_where_h11_ends() -> None:
    twice = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab"
    assert read_with_h11(twice) == Reading([], ended=True)


async def test_a_traceback_and_a_second_line_are_complaints() -> None:
    with Complaints() as complaints:
        logger = logging.getLogger("sglang_sbs.somewhere")
        logger.warning("all is well")
        assert complaints.taken() == []
        logger.warning("one\nand another")
        try:
            raise ValueError("x")
        except ValueError:
            logger.warning("it failed", exc_info=True)
        assert len(complaints.taken()) == 2


def test_changes_are_the_same_for_a_seed() -> None:
    for kind in KINDS:
        first, again = (list(islice(mutations(kind, 3), 20)) for _ in range(2))
        other = list(islice(mutations(kind, 4), 20))
        assert [repr(given) for given in first] == [repr(given) for given in again]
        assert [given.data for given in first] != [
            given.data for given in other
        ] or kind == "endforward"


def test_the_script_tries_inputs_and_counts_them(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    flags = ["--kinds", "bodies", "--seconds", "3", "--json", str(found)]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (row,) = json.loads(found.read_text())["rows"]
    assert row["kind"] == "bodies"
    assert row["tried"] > 10
    assert row["faulty"] == 0


def test_an_unknown_kind_is_reported() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--kinds", "smoke"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert "no kind smoke; there are http" in result.stderr
