"""Engines that answer as a request says: ``python -m benchmarks.hostile.engines``.

They are those of :mod:`benchmarks.raw_engine`. A request whose body has a member ``hostile``
gets the answer of that name; ``GET /metrics`` is a page of 10 MB.
"""

from __future__ import annotations

import asyncio

import orjson
import uvloop

from benchmarks.raw_engine import COMPLETE, STREAM_HEAD, Connection, reply, serve

_MB = 1_000_000
_AT_ONCE = 8
_PATHS = (b"/v1/chat/completions", b"/v1/completions", b"/v1/responses", b"/generate")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(size: int) -> bytes:
    choice = {"index": 0, "delta": {"content": "x" * size}, "finish_reason": None}
    return b"data: " + orjson.dumps({"id": "0", "choices": [choice]}) + b"\n\n"


def _needles() -> list[bytes]:
    """A stream of ``/v1/responses`` that repeats 4 MB of what the router looks for."""
    tools = [{"type": "function", "name": "f", "parameters": {"enum": ["output_tokens"] * 250_000}}]
    names = ("response.created", "response.in_progress", "response.completed")
    return [
        _chunk(event[at : at + 1024])
        for name in names
        for event in [b"data: %b\n\n" % orjson.dumps({"type": name, "response": {"tools": tools}})]
        for at in range(0, len(event), 1024)
    ]


def _answers() -> dict[str, list[bytes]]:
    """Return the answers by name, in the pieces they are sent in."""
    event = _event(10 * _MB)
    pieces = [_chunk(event[at : at + 1024]) for at in range(0, len(event), 1024)]
    small = _chunk(_event(8) * 200)
    deep = b'{"choices":' + b"[" * 500_000 + b"]" * 500_000 + b"}"
    wide = b'{"choices":[' + b"[]," * (10 * _MB // 3) + b"0]}"
    end = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    return {
        "large event": [STREAM_HEAD, *pieces, end],
        "needles": [STREAM_HEAD, *_needles(), b"0\r\n\r\n"],
        "many events": [STREAM_HEAD, *[small] * 500, end],
        "deep": [reply(deep)],
        "wide": [reply(wide)],
        "logprobs": [reply(orjson.dumps({"text": "x", "meta_info": {"prompt_tokens": 5}}))],
        "large": [reply(orjson.dumps({"choices": [], "text": "x" * 30 * _MB}))],
    }


def _prefill_answers() -> dict[str, list[bytes]]:
    """Return the answers of the prefill leg, by the same names."""
    logprobs = [[-0.123456, token, None] for token in range(20 * _MB // 24)]
    meta = {"prompt_tokens": 5, "cached_tokens": 0, "input_token_logprobs": logprobs}
    return {
        "needles": [COMPLETE],
        "logprobs": [reply(orjson.dumps({"text": "x", "meta_info": meta}))],
        "prefill large": [reply(orjson.dumps({"choices": [], "text": "x" * 30 * _MB}))],
    }


def _metrics_page() -> bytes:
    lines = (
        f'sglang:family{number % 50}{{rank="{number}"}} {number}.5\n' for number in range(250_000)
    )
    return "".join(lines).encode()


_ANSWERS = {"prefill": _prefill_answers(), "decode": _answers()}
_METRICS = reply(_metrics_page())


class HostileConnection(Connection):
    __slots__ = ()

    def request(self, path: bytes, body: bytes) -> None:
        if path == b"/metrics":
            self._write(_METRICS)
            return
        pieces = None
        if path in _PATHS and b'"hostile"' in body:
            pieces = _ANSWERS[self._engine.role].get(orjson.loads(body)["hostile"])
        if pieces is None:
            super().request(path, body)
        else:
            self._engine.loop.create_task(self._send(pieces))

    async def _send(self, pieces: list[bytes]) -> None:
        """Send the pieces nearly as fast as they are taken: an engine does not send megabytes in
        one packet."""
        for at in range(0, len(pieces), _AT_ONCE):
            for piece in pieces[at : at + _AT_ONCE]:
                self._write(piece)
            await asyncio.sleep(0.0005)


if __name__ == "__main__":
    uvloop.run(serve(HostileConnection))
