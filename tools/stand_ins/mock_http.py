"""HTTP answers of a scripted engine, and its streams whose events say their names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
from aiohttp import web

from tools.stand_ins.mock_answers import response_preamble
from tools.stand_ins.mock_script import Behaviour, HoldGate, RecordedRequest


async def begun(
    request: web.Request, record: RecordedRequest, behaviour: Behaviour, gate: HoldGate
) -> web.StreamResponse | None:
    """A stream of ``/v1/responses``, which begins before anything is computed, once past ``gate``.
    ``None``: the answer is of another form."""
    head_fault = behaviour.fault in ("hang_before_head", "reset_before_head")
    fails = behaviour.status != 200 or behaviour.garbage is not None or head_fault
    if fails or not (record.path.startswith("/v1/responses") and record.body.get("stream")):
        return None
    await gate.pass_through()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in response_preamble(record, behaviour):
        await response.write(as_event(event, event["type"]))
    return response


async def send_events(
    request: web.Request,
    response: web.StreamResponse,
    record: RecordedRequest,
    behaviour: Behaviour,
    events: Iterable[dict[str, Any]],
    token_gate: HoldGate,
) -> web.StreamResponse:
    """A fault mid body strikes after the first token. ``token_gate``: in front of each but the
    first."""
    tokens = 0
    for event in events:
        is_token = event["type"] in ("content_block_delta", "response.output_text.delta")
        tokens += is_token
        if is_token and tokens > 1:
            await token_gate.pass_through()
        await response.write(as_event(event, event["type"]))
        if not is_token or tokens > 1:
            continue
        if behaviour.garbage_tail is not None:
            await response.write(behaviour.garbage_tail)
            return response
        if behaviour.fault == "reset_mid_body":
            return reset(request)
        if behaviour.fault == "hang_mid_body":
            await record.aborted.wait()
            return reset(request)
    return response


def as_event(value: Any, name: str = "") -> bytes:
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + orjson.dumps(value) + b"\n\n"


def as_json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def error(status: int, message: str) -> web.Response:
    return as_json({"error": {"message": message}}, status)


def reset(request: web.Request) -> web.Response:
    """Cut the connection without a word."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
