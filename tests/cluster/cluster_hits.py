"""L_hit as a router predicts it and as engines report it, from the router's event log.

Owns reading that record, and conversations that grow. Must not know which cluster it is.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from cluster_requests import generate
from harness.until import until

from benchmarks.breakable import BreakableCluster
from sglang_sbs.scheduling.eventlog import LogRecord, read_event_log
from sglang_sbs.scheduling.events import BlocksStored, Dispatch, ForwardEnded, PrefillDone
from tools.cpu_engine.tiny_model import VOCAB_SIZE

PAGE_TOKENS = 16
RANKS = 2
NEW_TOKENS = 12
SYSTEM_PROMPT_TOKENS = 70
WAIT_S = 30.0


@dataclass
class Outcome:
    """One request: L_hit as predicted and as reported, and the rank it went to."""

    predicted: int
    reported: int
    rank: int

    @property
    def exact(self) -> bool:
        return self.predicted == self.reported


@dataclass
class Site:
    """A cluster, and one router's URL and record."""

    cluster: BreakableCluster
    url: str
    log: Path

    def records(self, since_s: float = 0.0) -> list[LogRecord]:
        return [r for r in read_event_log(self.log) if r.now_s >= since_s]

    async def until(self, done: Callable[[list[LogRecord]], bool], since_s: float) -> None:
        """Until the record since then, which is written with a delay, satisfies ``done``."""
        await until(lambda: done(self.records(since_s)), WAIT_S, every_s=0.2)

    async def until_started(self, rids: set[str]) -> dict[str, int]:
        """The pass that each was in first, once the record has all."""
        passes: dict[str, int] = {}

        def all_there(records: list[LogRecord]) -> bool:
            for record in records:
                if isinstance(record.event, ForwardEnded):
                    report = record.event.report
                    passes.update((request.rid, report.forward_id) for request in report.started)
            return rids <= passes.keys()

        await self.until(all_there, 0.0)
        return {rid: passes[rid] for rid in rids}

    async def outcomes(self, requests: int, since_s: float) -> list[Outcome]:
        """Return the outcomes of this many requests since then, in the order of their ends."""
        found: list[Outcome] = []

        def all_there(records: list[LogRecord]) -> bool:
            found.clear()
            placed: dict[str, Dispatch] = {}
            for record in records:
                placed |= {c.rid: c for c in record.commands if isinstance(c, Dispatch)}
                event = record.event
                if isinstance(event, PrefillDone) and event.cached_tokens is not None:
                    command = placed[event.rid]
                    found.append(
                        Outcome(command.cached_tokens, event.cached_tokens, command.prefill_rank)
                    )
            return len(found) >= requests

        await self.until(all_there, since_s)
        assert len(found) == requests
        return found


class Conversation:
    """Grows by what the user and the model say."""

    def __init__(self, seed: int, *, own_system_prompt: bool = False) -> None:
        self._draw = random.Random(seed)
        self.tokens = list(range(5, 5 + SYSTEM_PROMPT_TOKENS))
        if own_system_prompt:
            self._draw.shuffle(self.tokens)

    async def turn(self, http: aiohttp.ClientSession, url: str) -> None:
        new = self._draw.randrange(20, 90)
        self.tokens += [self._draw.randrange(3, VOCAB_SIZE) for _ in range(new)]
        reply = await generate(http, url, self.tokens, NEW_TOKENS)
        self.tokens += reply["output_ids"]

    async def turns(self, http: aiohttp.ClientSession, url: str, count: int) -> None:
        for _ in range(count):
            await self.turn(http, url)


def ranks_that_stored(records: list[LogRecord]) -> set[int]:
    return {r.event.dp_rank for r in records if isinstance(r.event, BlocksStored)}


def stored_on_all_ranks(records: list[LogRecord]) -> bool:
    return ranks_that_stored(records) == set(range(RANKS))


def environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS")}
    return own | {
        "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "2",
        "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1",
    }
