"""Conversations by the names that clients give them, and what of those names the router keeps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from multidict import CIMultiDict
from router_harness import cluster

from sglang_sbs.router.requests.body_fields import Body
from sglang_sbs.router.requests.headers import in_lower_case
from sglang_sbs.router.requests.raw_json import members_of
from sglang_sbs.router.requests.sessions import (
    HEADERS,
    LAST_HEADER,
    digest_of,
    session_in_body,
    session_in_headers,
)
from sglang_sbs.scheduling.events import MAX_SESSION_CHARS, RequestArrived

UUID = "57a121ec-f78c-48c3-a745-e3036a3ecc33"
ACCOUNT = "user_0a1b2c_account_11111111-2222-3333-4444-555555555555"


def in_body(*, messages: bool = True, **body: Any) -> str:
    return session_in_body(Body(members_of(json.dumps(body).encode())), has_user=messages)


def test_the_first_header_of_the_table_names_the_session() -> None:
    given = [(name.title(), f"of {name}") for name in (LAST_HEADER, *reversed(HEADERS))]
    headers = in_lower_case(CIMultiDict(given))
    for name in HEADERS:
        assert session_in_headers(headers) == (f"of {name}", f"of {LAST_HEADER}")
        headers = [header for header in headers if header[0] != name]
    assert session_in_headers(headers) == ("", f"of {LAST_HEADER}")
    assert session_in_headers([("x-session-id", " "), ("user-agent", "x")]) == ("", "")
    assert session_in_headers([("x-session-id", "a"), ("x-session-id", "b")]) == ("a", "")


@pytest.mark.parametrize(
    ("body", "session"),
    [
        ({"session_id": "s", "prompt_cache_key": "k"}, "s"),
        ({"session_id": None, "prompt_cache_key": "k"}, "k"),
        ({"session_id": ["s"], "prompt_cache_key": ""}, ""),
        ({"metadata": {"user_id": f"{ACCOUNT}_session_{UUID}"}}, UUID),
        ({"metadata": {"user_id": f"user_0a1b2c_account__session_{UUID}"}}, UUID),
        ({"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": UUID})}}, UUID),
        ({"metadata": {"user_id": json.dumps({"session_id": 7})}}, ""),
        ({"metadata": {"user_id": json.dumps(["session_id"])}}, ""),
        ({"metadata": {"user_id": ACCOUNT}}, ""),
        ({"metadata": {"user_id": "[" * 4000}}, ""),
        ({"metadata": {"user_id": f"{'x' * 5000}_session_{UUID}"}}, ""),
        ({"metadata": {"user_id": 7}}, ""),
        ({"metadata": {}}, ""),
        ({"metadata": []}, ""),
        ({"metadata": None}, ""),
        ({"user": "somebody"}, ""),
    ],
)
def test_a_body_names_its_session(body: dict[str, Any], session: str) -> None:
    assert in_body(**body) == session


def test_metadata_of_other_apis_is_not_looked_at() -> None:
    assert in_body(messages=False, metadata={"user_id": f"{ACCOUNT}_session_{UUID}"}) == ""


def test_names_are_bounded_and_distinguished_to_the_end() -> None:
    long, other = "s" * 60_000, "s" * 59_999 + "t"
    assert digest_of(in_body(session_id=long)) != digest_of(in_body(session_id=other))
    assert len(digest_of(long)) <= MAX_SESSION_CHARS
    assert digest_of("") == ""
    assert digest_of("\udcff") == digest_of("\udcff")


async def test_the_scheduler_gets_one_name_per_conversation_and_nothing_of_the_person() -> None:
    user = f"{ACCOUNT}_session_{UUID}"
    messages = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    calls: list[tuple[str, dict[str, Any], dict[str, str]]] = [
        ("/v1/messages", messages | {"metadata": {"user_id": user}}, {}),
        ("/v1/messages", messages, {"X-Claude-Code-Session-Id": UUID, LAST_HEADER: "one request"}),
        ("/v1/responses", {"model": "m", "input": "x", "prompt_cache_key": UUID}, {}),
        ("/generate", {"text": "x", "session_id": UUID}, {LAST_HEADER: "one request"}),
        ("/generate", {"text": "x", "session_id": "another"}, {"session_id": UUID}),
        ("/generate", {"text": "x"}, {LAST_HEADER: UUID}),
        ("/generate", {"text": "x"}, {}),
    ]
    async with cluster() as c:
        for path, body, headers in calls:
            async with c.post(path, body, headers=headers) as answer:
                assert answer.status == 200
        arrived = c.scheduler.of(RequestArrived)
    assert [event.session for event in arrived] == [digest_of(UUID)] * 6 + [""]
    assert UUID not in repr(arrived)
