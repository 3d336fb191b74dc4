"""The HTTP API: a table and an OpenAPI document, from the routes that a router really has.

Owns what an endpoint is for. A route without a line here, or a line without a route, is an error.
"""

from __future__ import annotations

import asyncio
import json
import re
from functools import cache
from typing import Any, NamedTuple

from sglang_sbs import __version__
from sglang_sbs.router.api.access import CONTROL_PLANE, OPEN_PATHS
from sglang_sbs.router.api.surface import _NOT_IMPLEMENTED
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.server import RouterServer
from tools.reference.pages import head, table


class Endpoint(NamedTuple):
    group: str
    what: str
    body: dict[str, Any] | None = None
    """JSON schema of the request's body."""


_TEXT = {"type": "string"}
_INFERENCE = {"type": "object", "additionalProperties": True}
_WORKER_BODY = {
    "type": "object",
    "required": ["url", "worker_type"],
    "properties": {
        "url": _TEXT,
        "worker_type": {"enum": ["prefill", "decode"]},
        "bootstrap_port": {"type": "integer", "minimum": 1, "maximum": 65535},
    },
}
_LABELS_BODY = {
    "type": "object",
    "properties": {
        "priority": {"type": "integer", "minimum": 0},
        "cost": {"type": "number"},
        "labels": {"type": "object", "additionalProperties": _TEXT},
    },
}
_POLICY_BODY = {"type": "object", "required": ["policy"], "properties": {"policy": _TEXT}}
_TRIAL_BODY = {"type": "object", "required": ["baseline"], "properties": {"baseline": _TEXT}}
_ABORT_BODY = {"type": "object", "properties": {"rid": _TEXT, "abort_all": {"type": "boolean"}}}
_PROMPT_BODY = {"type": "object", "properties": {"prompt": {}, "messages": {"type": "array"}}}
_TOKENS_BODY = {"type": "object", "required": ["tokens"], "properties": {"tokens": {}}}

_RUN, _HEALTH, _MODEL, _WORKERS, _POLICY, _SEE, _TOKENS = (
    *("Inference", "Health", "Model and server", "Workers", "Policy", "Observation", "Tokenizer"),
)
ENDPOINTS: dict[str, Endpoint] = {
    "POST /generate": Endpoint(_RUN, "SGLang's own API, streaming or not", _INFERENCE),
    "POST /v1/completions": Endpoint(_RUN, "OpenAI's completions, streaming or not", _INFERENCE),
    "POST /v1/chat/completions": Endpoint(_RUN, "OpenAI's chat, streaming or not", _INFERENCE),
    "POST /v1/responses": Endpoint(
        _RUN, "OpenAI's Responses API, streaming or not; nothing is stored", _INFERENCE
    ),
    "GET /v1/responses/{id}": Endpoint(_RUN, "400: responses are not stored"),
    "POST /v1/responses/{id}/cancel": Endpoint(_RUN, "400: responses are not stored"),
    "POST /v1/messages": Endpoint(_RUN, "Anthropic's API, streaming or not", _INFERENCE),
    "POST /v1/messages/count_tokens": Endpoint(_RUN, "one engine counts", _INFERENCE),
    "POST /abort_request": Endpoint(
        _RUN, "abort one request by the id that the client gave it, or all", _ABORT_BODY
    ),
    "GET /health": Endpoint(_HEALTH, "200 as soon as the process listens"),
    "GET /liveness": Endpoint(_HEALTH, "as `/health`"),
    "GET /readiness": Endpoint(
        _HEALTH, "200 when a healthy prefill and a healthy decode instance are known, else 503"
    ),
    "GET /health_generate": Endpoint(
        _HEALTH, "generates on one pair; concurrent requests share the answer"
    ),
    "GET /v1/models": Endpoint(_MODEL, "the models of the workers"),
    "GET /v1/models/{model}": Endpoint(_MODEL, "one of them, by name"),
    "GET /model_info": Endpoint(_MODEL, "from a prefill worker"),
    "GET /get_model_info": Endpoint(_MODEL, "as `/model_info`"),
    "GET /server_info": Endpoint(
        _MODEL,
        "the first prefill's fields, `prefill`, `decode`, `internal_states`, the scheduler's "
        "state (`sbs`) and the features that are on (`sbs_options`)",
    ),
    "GET /get_server_info": Endpoint(_MODEL, "as `/server_info`"),
    "GET /workers": Endpoint(_WORKERS, "every worker: state, load and problems"),
    "POST /workers": Endpoint(_WORKERS, "add a worker", _WORKER_BODY),
    "GET /workers/{worker_id}": Endpoint(_WORKERS, "one worker, by id or percent-encoded URL"),
    "PUT /workers/{worker_id}": Endpoint(
        _WORKERS, "label a worker; labels are shown, not used for placement", _LABELS_BODY
    ),
    "DELETE /workers/{worker_id}": Endpoint(
        _WORKERS, "remove a worker; requests that run there end normally"
    ),
    "DELETE /workers": Endpoint(_WORKERS, "remove a worker by `?url=URL`"),
    "POST /workers/{worker_id}/drain": Endpoint(
        _WORKERS, "send no new requests there; requests that run there end normally"
    ),
    "POST /workers/{worker_id}/undrain": Endpoint(_WORKERS, "send requests there again"),
    "POST /flush_cache": Endpoint(_WORKERS, "ask every worker to flush its cache"),
    "GET /get_loads": Endpoint(_WORKERS, "the load of every worker"),
    "GET /v1/loads": Endpoint(_WORKERS, "as `/get_loads`"),
    "GET /policy": Endpoint(_POLICY, "the policy that decides, since when, and who set it"),
    "PUT /policy": Endpoint(_POLICY, "switch to another policy", _POLICY_BODY),
    "GET /trial": Endpoint(_POLICY, "the trial that runs, or the last one"),
    "POST /trial": Endpoint(_POLICY, "begin a trial against a baseline", _TRIAL_BODY),
    "DELETE /trial": Endpoint(_POLICY, "end the trial"),
    "GET /requests/{name}": Endpoint(
        _SEE, "one of the last 4,096 requests by any of its ids: times, reasons, attempts"
    ),
    "GET /well": Endpoint(_SEE, "is all well? level, cause, what to do, alerts, gain"),
    "GET /engine_metrics": Endpoint(_SEE, "the workers' own metrics as one page"),
    "GET /dashboard": Endpoint(_SEE, "the dashboard"),
    "GET /dashboard/events": Endpoint(_SEE, "the stream of events behind the dashboard"),
    "POST /v1/tokenize": Endpoint(_TOKENS, "tokens of a prompt or a chat", _PROMPT_BODY),
    "POST /tokenize": Endpoint(_TOKENS, "as `/v1/tokenize`", _PROMPT_BODY),
    "POST /v1/detokenize": Endpoint(_TOKENS, "text of tokens", _TOKENS_BODY),
    "POST /detokenize": Endpoint(_TOKENS, "as `/v1/detokenize`", _TOKENS_BODY),
    "GET /v1/tokenizers": Endpoint(_TOKENS, "the tokenizer of `--tokenizer-path`"),
}
_ASSETS = re.compile(r"GET /dashboard/[\w.-]+\.\w+")
"""Files of the dashboard's page."""
_INTRODUCTION = """
The serving port (`--port`, 30000) answers these requests. [openapi.json](openapi.json) has the same
for programs. Metrics are on a port of their own ([metrics](../metrics.md)).

Keys are bearer tokens. *API key* is `--api-key`, if there is one. *Admin* is a key of
`--admin-api-key` or `--control-plane-api-keys`, or a token of the identity provider; without any of
these it is the API key. Errors are JSON with a [code](errors.md).
"""
_LOCAL = (
    *("--host", "127.0.0.1", "--port", "0", "--prometheus-host", "127.0.0.1", "--prometheus-port"),
    *("0", "--sbs-endforward-bind", "none", "--pd-disaggregation"),
)


@cache
def endpoints() -> dict[str, Endpoint]:
    """Return the endpoints of a router, by method and path. Raises: ValueError, one is not
    described here."""
    found = [name for name in asyncio.run(_routes()) if not _ASSETS.fullmatch(name)]
    refused = {_plain_path(path) for path in _NOT_IMPLEMENTED}
    served = [name for name in found if name.partition(" ")[2] not in refused or name in ENDPOINTS]
    served = [name for name in served if not name.startswith(("*", "HEAD "))]
    if wrong := set(served) ^ ENDPOINTS.keys():
        raise ValueError(f"routes and ENDPOINTS differ: {', '.join(sorted(wrong))}")
    return ENDPOINTS


async def _routes() -> list[str]:
    server = RouterServer(parse_flags(_LOCAL))
    await server.start()
    try:
        assert server._runner is not None and server._runner.app is not None
        routes = server._runner.app.router.routes()
        named = [(route.method, route.resource) for route in routes]
        return [f"{how} {_plain_path(to.canonical)}" for how, to in named if to is not None]
    finally:
        await server.stop(grace_s=0.0)


def _plain_path(path: str) -> str:
    """Without the expressions of its parameters."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)


def key_of(path: str) -> str:
    """Which key a request to ``path`` needs."""
    if path.startswith(CONTROL_PLANE):
        return "admin"
    return "none" if path in OPEN_PATHS else "API key"


def page() -> str:
    """``docs/reference/http-api.md``."""
    parts = [head("HTTP API"), _INTRODUCTION.lstrip("\n")]
    groups = dict.fromkeys(endpoint.group for endpoint in endpoints().values())
    for group in groups:
        rows = [
            (f"`{name}`", key_of(name.partition(" ")[2]), endpoint.what)
            for name, endpoint in endpoints().items()
            if endpoint.group == group
        ]
        parts += [f"## {group}", "", table(("request", "key", "what for"), rows), ""]
    refused = [(f"`{_plain_path(path)}`", what) for path, what in sorted(_NOT_IMPLEMENTED.items())]
    parts += ["## Not served", "", "These answer 501 `not_implemented`.", ""]
    return "\n".join([*parts, table(("path", "what"), refused), ""])


def document() -> str:
    """``docs/reference/openapi.json``."""
    paths: dict[str, dict[str, Any]] = {}
    for name, endpoint in endpoints().items():
        method, _, path = name.partition(" ")
        paths.setdefault(path, {})[method.lower()] = _operation(path, endpoint)
    error = {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "required": ["type", "code", "message"],
                "properties": {
                    "type": _TEXT,
                    "code": _TEXT,
                    "message": _TEXT,
                    "param": {"type": ["string", "null"]},
                },
            }
        },
    }
    bearer = {"type": "http", "scheme": "bearer"}
    found = {
        "openapi": "3.1.0",
        "info": {"title": "sglang-sbs", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": error},
            "securitySchemes": {"api_key": bearer, "admin": bearer},
        },
    }
    return json.dumps(found, indent=1) + "\n"


def _operation(path: str, endpoint: Endpoint) -> dict[str, Any]:
    shape = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {"tags": [endpoint.group], "summary": endpoint.what.replace("`", "")}
    if names := re.findall(r"\{(\w+)\}", path):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in names
        ]
    if endpoint.body is not None:
        content = {"application/json": {"schema": endpoint.body}}
        found["requestBody"] = {"required": True, "content": content}
    found["responses"] = {
        "200": {"description": "the answer"},
        "default": {"description": "an error", "content": shape},
    }
    key = key_of(path)
    found["security"] = [] if key == "none" else [{"admin" if key == "admin" else "api_key": []}]
    return found
