"""The secrets in an engine's /server_info reach nothing that this package shows."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest
from rich.console import Console
from router_harness import cluster

from sglang_sbs.dashboard.client import frames
from sglang_sbs.dashboard.top_view import TopView

PLANTED = "pl4nted"
LOGIN = f"http://user:{PLANTED}@store:1"
SAYS: dict[str, Any] = {
    "version": f"0.5.23 token={PLANTED}",
    "served_model_name": f"s3://key:{PLANTED}@store/model",
    "model_path": f"s3://key:{PLANTED}@store/model",
    "load_balance_method": f"auto --api-key {PLANTED}",
    "disaggregation_transfer_backend": f"mooncake password={PLANTED}",
    "dist_init_addr": LOGIN,
    "nnodes": 2,
    "api_key": PLANTED,
    "admin_api_key": PLANTED,
    "launch_command": f"python -m sglang.launch_server --api-key {PLANTED}",
    "sbs": {"boot_id": "ab12", "bind": LOGIN, "routers": [LOGIN]},
    "kv_events": {"publisher": "zmq", "endpoint_host": LOGIN, "topic": f"token={PLANTED}"},
}
PATHS = (
    *("/workers", "/server_info", "/get_server_info", "/model_info", "/get_model_info"),
    *("/v1/models", "/get_loads", "/dashboard", "/readiness", "/health"),
)


def written(events: Path) -> list[Path]:
    return [path for path in events.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize("mode", ["as given", "another"])
async def test_nothing_of_a_router_shows_them(
    mode: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "sglang_sbs")
    events = tmp_path / "events"
    says = SAYS | ({} if mode == "as given" else {"disaggregation_mode": f"token={PLANTED}"})
    flags = ("--sbs-event-log", str(events))
    async with cluster(
        *flags, real=True, prefill_says=says, decode_says=says, wait=mode == "as given"
    ) as c:
        for engine in (*c.prefill, *c.decode):
            info = orjson.dumps({"model_path": LOGIN, "weight_version": f"token={PLANTED}"})
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(info)
            engine.raw_answers["/model_info"] = head + info
        shown = []
        url = f"http://127.0.0.1:{c.server.port}"
        if mode == "as given":
            async with c.post("/generate", {"text": "x"}) as response:
                assert response.status == 200
        async with aiohttp.ClientSession() as client:
            metrics = f"http://127.0.0.1:{c.server.prometheus_port}/metrics"
            for place in (metrics, *(url + path for path in PATHS)):
                async with client.get(place) as response:
                    shown.append(await response.text())
        assert any("store" in text or mode == "another" for text in shown), "what is left is shown"
        async for frame in frames(url, None):
            shown.append(orjson.dumps(frame).decode())
            console = Console(record=True, width=200, height=80, file=io.StringIO())
            console.print(TopView(frame, "here"))
            shown.append(console.export_text())
            break
    shown += [caplog.text, *(path.read_bytes().decode("latin1") for path in written(events))]
    assert PLANTED not in "\n".join(shown)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("form", ["SGLang's", "text", "abort"])
async def test_nothing_of_an_engines_error_shows_them(
    role: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "sglang_sbs")
    why = f"cannot read {LOGIN}/model with --api-key {PLANTED}: 101 tokens: 60 tokens from input"
    status, answer = 500, why.encode()
    if form == "SGLang's":
        answer = orjson.dumps({"error": {"message": why, "code": 500}})
    elif form == "abort":
        reason = {"type": "abort", "message": why, "status_code": 500}
        status, answer = 200, orjson.dumps({"text": "", "meta_info": {"finish_reason": reason}})
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    async with cluster("--disable-retries") as c:
        engine = (c.prefill if role == "prefill" else c.decode)[0]
        engine.raw_answers["/generate"] = head % (status, len(answer)) + answer
        got, error = await c.generate(text="x")
    assert got == 500
    message = error["error"]["message"]
    assert "cannot read http://***@store:1/model with --api-key ***" in message
    assert "101 tokens: 60 tokens" in message, "clients read these numbers"
    assert PLANTED not in message + caplog.text
