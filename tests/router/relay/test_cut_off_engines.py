"""A prefill engine whose KV never arrives: it looks idle, and only decode reports a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from router_harness import FakeScheduler, cluster

from sglang_sbs.scheduling.events import InstanceUp, RequestArrived
from tools.stand_ins.mock_engine import Behaviour, MockEngine, RecordedRequest

CUT_OFF = 9001
"""Bootstrap port of a prefill engine from which no KV can be fetched."""


class WithoutTransfer(MockEngine):
    """Decode reports that the KV of a prefill engine at ``CUT_OFF`` cannot be fetched; that engine
    notices nothing."""

    async def _until_answer(self, record: RecordedRequest, behaviour: Behaviour) -> None:
        if record.body["bootstrap_port"] != CUT_OFF:
            await super()._until_answer(record, behaviour)
        elif self.role == "prefill":
            await asyncio.Event().wait()

    async def _answer(
        self, request: Any, record: RecordedRequest, behaviour: Behaviour, begun: Any
    ) -> Any:
        if self.role == "decode" and record.body["bootstrap_port"] == CUT_OFF:
            behaviour = Behaviour(status=500, message="Decode transfer failed")
        return await super()._answer(request, record, behaviour, begun)


class Stubborn(FakeScheduler):
    """Sends everything to the same pair while it may: that prefill engine always looks idle."""

    def _pick(self, role: str, exclude: tuple[str, ...]) -> InstanceUp | None:
        of_role = [up for up in self.up.values() if up.role == role]
        return next(iter([up for up in of_role if up.instance not in exclude] or of_role), None)


@pytest.mark.parametrize("decode", [1, 3])
async def test_a_prefill_engine_whose_kv_never_arrives_is_avoided_and_blamed(decode: int) -> None:
    scheduler, flags = Stubborn(), ("--cb-failure-threshold", "3", "--retry-max-retries", "3")
    async with cluster(
        *flags, scheduler=scheduler, prefill=2, decode=decode, kind=WithoutTransfer
    ) as c:
        first = scheduler._pick("prefill", ())
        assert first is not None
        cut_off = c.server.registry.get(first.instance)
        assert cut_off is not None
        cut_off.configured_bootstrap_port = CUT_OFF
        for _ in range(2):
            assert (await c.generate(text="x"))[0] == 200
        assert cut_off.breaker.state == "open"
        others = [worker for worker in c.server.registry if worker is not cut_off]
        assert [worker.failures for worker in others] == [0] * (1 + decode)
        assert (await c.generate(text="x"))[0] == 200
        assert len(scheduler.of(RequestArrived)) == 3 + 3 + 1
        await c.settled()
