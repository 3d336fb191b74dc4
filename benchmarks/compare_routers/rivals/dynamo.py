"""Dynamo's KV router in front of SGLang engines: its own selection, behind a relay of ours.

    python -m benchmarks.compare_routers.rivals.dynamo --pd-disaggregation --prefill URL PORT ...

Dynamo's workers hold the engine in their own process and pin another SGLang, so they are not what
the other contenders run on. Its KV router is a library (``SelectionService`` of the package
``ai-dynamo-runtime``, without etcd and NATS): who gets a request, worker and DP rank, is decided by
that code. The relay does around it what Dynamo's frontend does: it tokenizes, has both legs placed,
sends them at once, says when prefill is over, and frees the reservations.

Without KV events of the engines Dynamo predicts their caches from what it sent
(``--no-router-kv-events`` there).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tokenizers import Tokenizer

_PREFILL, _DECODE = "prefill", "decode"
_ROOMS = 2**30
_ON_DECODE = {"overlap_score_credit": 0.0, "assume_kv_reuse": False, "track_prefill_tokens": False}
"""Options that Dynamo's frontend gives its decode router: load alone."""


@dataclass(frozen=True, slots=True)
class Leg:
    url: str
    rank: int
    dp_size: int
    selection: str


class DynamoRouter:
    """Places and relays ``POST /generate``."""

    def __init__(self, service: Any, tokenizer: Tokenizer, session: aiohttp.ClientSession) -> None:
        """``service``: a ``dynamo.llm.SelectionService``, or what acts as one."""
        self._service = service
        self._tokenizer = tokenizer
        self._session = session
        self._dp_sizes: dict[str, int] = {}
        self._bootstrap: dict[str, int | None] = {}
        self._numbers = itertools.count(1)

    async def add_worker(self, role: str, url: str, bootstrap_port: int | None = None) -> None:
        """Tell Dynamo of an engine that is up, as the engine describes itself."""
        async with self._session.get(f"{url}/server_info") as response:
            info = await response.json()
        # Under DP attention `dp_size` is 1 and the other is the number of ranks.
        dp_size = max(int(info.get("attn_dp_size") or 1), int(info.get("dp_size") or 1))
        page = int(info.get("page_size") or 1)
        tokens = int(info.get("max_total_num_tokens") or 0)
        await self._service.upsert_worker(
            {
                "worker_id": next(self._numbers),
                "model_name": role,
                "endpoint": url,
                "block_size": page,
                "data_parallel_start_rank": 0,
                "data_parallel_size": dp_size,
                "max_num_batched_tokens": int(info.get("chunked_prefill_size") or 0) or None,
                "total_kv_blocks": tokens // page or None,
            }
        )
        self._dp_sizes[url] = dp_size
        self._bootstrap[url] = bootstrap_port

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = orjson.loads(await request.read())
        text = body.pop("text", None)
        if text is not None:
            body["input_ids"] = self._tokenizer.encode(text, add_special_tokens=False).ids
        name = f"{next(self._numbers)}"
        prefill = await self._select(_PREFILL, name, body["input_ids"])
        decode = await self._select(_DECODE, name, body["input_ids"])
        # The rank that the room names is the one Dynamo chose: engines follow the room.
        rooms = random.randrange(_ROOMS // prefill.dp_size)
        body |= {
            "bootstrap_host": prefill.url.removeprefix("http://").partition(":")[0],
            "bootstrap_port": self._bootstrap[prefill.url],
            "bootstrap_room": rooms * prefill.dp_size + prefill.rank,
        }
        prefilled = asyncio.create_task(self._prefill(prefill, body))
        try:
            return await self._relay(request, decode, body)
        finally:
            await self._service.free_reservation(decode.selection)
            await prefilled

    async def _select(self, role: str, name: str, tokens: Sequence[int]) -> Leg:
        wanted: dict[str, Any] = {
            "model_name": role,
            "selection_id": f"{role}-{name}",
            "token_ids": tokens,
        }
        if role == _DECODE:
            wanted["router_config_override"] = _ON_DECODE
        found = await self._service.select_and_reserve(wanted)
        url = found["endpoint"]
        return Leg(url, found["dp_rank"], self._dp_sizes[url], wanted["selection_id"])

    async def _prefill(self, leg: Leg, body: dict[str, Any]) -> None:
        """The prefill leg; its answer is for nobody."""
        try:
            async with self._session.post(
                f"{leg.url}/generate", json=body | {"routed_dp_rank": leg.rank}
            ) as response:
                await response.read()
        except aiohttp.ClientError:
            pass  # decode's answer says so
        finally:
            await self._service.prefill_complete(leg.selection)
            await self._service.free_reservation(leg.selection)

    async def _relay(
        self, request: web.Request, leg: Leg, body: dict[str, Any]
    ) -> web.StreamResponse:
        async with self._session.post(
            f"{leg.url}/generate", json=body | {"routed_dp_rank": leg.rank}
        ) as upstream:
            answer = web.StreamResponse(
                status=upstream.status, headers={"Content-Type": upstream.content_type}
            )
            await answer.prepare(request)
            async for piece in upstream.content.iter_any():
                await answer.write(piece)
            await answer.write_eof()
            return answer


async def _ready(_request: web.Request) -> web.Response:
    return web.Response()


async def _serve(args: argparse.Namespace) -> None:
    os.environ.setdefault("DYN_ROUTER_USE_KV_EVENTS", "false")
    os.environ.setdefault("DYN_LOG", "error")
    from dynamo.llm import SelectionService

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        json_serialize=lambda body: orjson.dumps(body).decode(),
    ) as session:
        tokenizer = Tokenizer.from_file(str(args.tokenizer_path / "tokenizer.json"))
        router = DynamoRouter(SelectionService(indexer_threads=1), tokenizer, session)
        for url, *port in args.prefill:
            await router.add_worker(_PREFILL, url, int(port[0]) if port else None)
        for url in args.decode:
            await router.add_worker(_DECODE, url)
        app = web.Application(client_max_size=2**28)
        app.add_routes([web.post("/generate", router.generate), web.get("/readiness", _ready)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, args.host, args.port).start()
        await asyncio.Event().wait()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pd-disaggregation", action="store_true")
    parser.add_argument("--prefill", nargs="+", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--prometheus-host", help="there are no metrics")
    parser.add_argument("--prometheus-port", help="there are no metrics")
    parser.add_argument("--tokenizer-path", type=Path, required=True)
    asyncio.run(_serve(parser.parse_args(argv)))


if __name__ == "__main__":
    main()
