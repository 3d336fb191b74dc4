"""The relay around Dynamo's selection: what Dynamo receives, and what engines get."""

from __future__ import annotations

from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.compare_routers.rivals.dynamo import DynamoRouter


class Selection:
    """Acts as Dynamo: the last worker of the role, rank 1."""

    def __init__(self) -> None:
        self.workers: list[dict[str, Any]] = []
        self.reserved: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []

    async def upsert_worker(self, worker: dict[str, Any]) -> None:
        self.workers.append(worker)

    async def select_and_reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        self.reserved[request["selection_id"]] = request
        mine = [worker for worker in self.workers if worker["model_name"] == request["model_name"]]
        return {"endpoint": mine[-1]["endpoint"], "dp_rank": 1}

    async def prefill_complete(self, name: str) -> None:
        self.calls.append(("prefilled", name))

    async def free_reservation(self, name: str) -> None:
        self.calls.append(("freed", name))
        del self.reserved[name]


class Engine:
    """Keeps bodies; answers in two pieces, or with a status."""

    def __init__(self, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._status = status
        app = web.Application()
        app.add_routes(
            [web.post("/generate", self._generate), web.get("/server_info", self._server_info)]
        )
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def _server_info(self, _request: web.Request) -> web.Response:
        info = {"dp_size": 1, "attn_dp_size": 4, "page_size": 16, "max_total_num_tokens": 1600}
        return web.json_response(info | {"chunked_prefill_size": 512})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self._status != 200:
            return web.Response(status=self._status, text="broken")
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b'data: {"text": "a"}\n\n')
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def _through(prefill: Engine, decode: Engine) -> tuple[Selection, int, str]:
    tokenizer = Tokenizer(WordLevel({"one": 7, "two": 8, "?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    selection = Selection()
    async with prefill.server, decode.server, aiohttp.ClientSession() as session:
        router = DynamoRouter(selection, tokenizer, session)
        await router.add_worker("prefill", prefill.url, 8998)
        await router.add_worker("decode", decode.url)
        app = web.Application()
        app.add_routes([web.post("/generate", router.generate)])
        async with TestServer(app) as front:
            url = f"http://127.0.0.1:{front.port}/generate"
            async with session.post(url, json={"text": "one two", "stream": True}) as response:
                return selection, response.status, await response.text()


async def test_engines_get_the_ranks_that_dynamo_chose_and_it_hears_what_became_of_them() -> None:
    prefill, decode = Engine(), Engine()
    selection, status, answer = await _through(prefill, decode)
    assert (status, answer) == (200, 'data: {"text": "a"}\n\ndata: [DONE]\n\n')
    (first,), (second,) = prefill.bodies, decode.bodies
    assert first == second
    assert first["input_ids"] == [7, 8] and "text" not in first
    assert (first["routed_dp_rank"], first["bootstrap_room"] % 4) == (1, 1)
    assert (first["bootstrap_host"], first["bootstrap_port"]) == ("127.0.0.1", 8998)
    assert [worker["data_parallel_size"] for worker in selection.workers] == [4, 4]
    assert [worker["total_kv_blocks"] for worker in selection.workers] == [100, 100]
    assert selection.reserved == {}
    names = {name.partition("-")[0] for what, name in selection.calls if what == "prefilled"}
    assert names == {"prefill"}


async def test_what_fails_is_freed_and_says_so() -> None:
    selection, status, answer = await _through(Engine(500), Engine(503))
    assert (status, answer, selection.reserved) == (503, "broken", {})
