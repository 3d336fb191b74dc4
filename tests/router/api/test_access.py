"""Keys, roles and the audit log; the token bucket at the front door; changes of workers."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import aiohttp
import pytest
from router_harness import cluster, until

from sglang_sbs.router.api.access import Access
from sglang_sbs.router.errors import RouterError
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.keys import ControlKey, parse_control_key
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.relay.admission import Admission

KEYS = ("--control-plane-api-keys", "ops:Operations:admin:adm:1", "ro:Read only:user:usr")


def bearer(key: str | None) -> dict[str, str]:
    """Return headers with the key; the HTTP layers give their names in any case, or in lower
    case."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


# Control-plane keys -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "status", "text"),
    [
        (None, 401, "Missing or invalid Authorization header"),
        ("api", 401, "Invalid authentication token"),
        ("adm", 401, "Invalid authentication token"),
        ("usr", 403, "Admin role required for control plane access"),
        ("adm:1", 200, None),
        ("boss", 200, None),
    ],
)
async def test_the_control_plane_wants_a_key_of_an_admin(
    key: str | None, status: int, text: str | None
) -> None:
    flags = (*KEYS, "--api-key", "api", "--admin-api-key", "boss")
    async with cluster(*flags, wait=False) as c:
        for method, path in (("GET", "/workers"), ("GET", "/get_loads")):
            url = c.url + path
            async with c.client.request(method, url, headers=bearer(key)) as response:
                assert response.status == status
                assert text is None or await response.text() == text
                challenge = response.headers.get("WWW-Authenticate")
                assert challenge == ('Bearer realm="control-plane"' if status == 401 else None)


async def test_control_plane_keys_do_not_open_inference_and_paths_that_do_not_exist_are_404() -> (
    None
):
    async with cluster(*KEYS, "--api-key", "api") as c:
        for key, status in (("adm:1", 401), ("usr", 401), ("api", 200)):
            url = c.url + "/generate"
            async with c.client.post(url, json={"text": "x"}, headers=bearer(key)) as response:
                assert response.status == status
        async with c.get("/nothing") as response:
            assert response.status == 404


async def test_without_control_plane_keys_the_api_key_is_wanted_there() -> None:
    async with cluster("--api-key", "api", wait=False) as c:
        for key, status in ((None, 401), ("api", 200)):
            async with c.client.get(c.url + "/workers", headers=bearer(key)) as response:
                assert response.status == status


async def test_the_audit_log_names_ids_and_never_keys(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="sglang_sbs.audit")
    async with cluster(*KEYS, "--control-plane-audit-enabled", wait=False) as c:
        for key in ("adm:1", "usr", "guess-123"):
            headers = bearer(key) | {"X-Request-Id": "id-\t1"}
            async with c.client.get(c.url + "/workers", headers=headers):
                pass
    lines = [record.getMessage() for record in caplog.records if "audit" in record.name]
    records = [json.loads(line.removeprefix("control_plane_audit ")) for line in lines]
    assert [(r["principal"], r["role"], r["outcome"]) for r in records] == [
        ("ops", "admin", "success"),
        ("ro", "user", "denied"),
        ("unauthenticated", None, "denied"),
    ]
    assert {r["request_id"] for r in records} == {"id-\t1"}
    assert not any(secret in caplog.text for secret in ("adm:1", "usr", "guess-123"))


@pytest.mark.parametrize("text", ["", "a:b:admin", "a:b:root:secret-1", ":b:admin:secret-1", "a"])
def test_bad_control_plane_keys_are_refused_without_repeating_the_key(text: str) -> None:
    with pytest.raises(FlagError, match="--control-plane-api-keys") as error:
        parse_flags(["--control-plane-api-keys", text])
    assert "secret-1" not in str(error.value)


def test_options_do_not_show_control_plane_keys() -> None:
    options = parse_flags(["--control-plane-api-keys", "a:b:admin:secret-1"])
    assert options.control_plane_keys[0].key == "secret-1"
    assert "secret-1" not in repr(options.control_plane_keys)
    with pytest.raises(FlagError, match="two keys have the id 'a'"):
        parse_flags(["--control-plane-api-keys", "a:b:admin:x", "a:c:user:y"])


async def test_every_key_is_compared_whichever_fits(monkeypatch: Any) -> None:
    compared: list[bytes] = []

    def compare(given: bytes, key: bytes) -> bool:
        compared.append(key)
        return given == key

    monkeypatch.setattr("sglang_sbs.router.api.access.hmac.compare_digest", compare)
    keys = [ControlKey(str(n), "", "admin", f"k{n}") for n in range(3)]
    access = Access(None, keys)
    assert await access.refusal("GET", "/workers", bearer("k0"), "") is None
    assert compared == [b"k0", b"k1", b"k2"]
    assert parse_control_key("a:b:ADMIN:k:1").key == "k:1"


# The front door ---------------------------------------------------------------------------------


async def test_a_bucket_without_refill_is_a_limit_of_requests_at_once() -> None:
    door = Admission(2, 1, 0.05)
    async with door.slot(), door.slot():
        with pytest.raises(RouterError) as error:
            async with door.slot():
                pass
        assert (error.value.status, error.value.code) == (503, "queue_timeout")
    async with door.slot():
        assert door.running == 1


async def test_tokens_come_back_in_the_order_of_asking_and_never_beyond_the_bucket() -> None:
    door = Admission(1, 10, 20.0)
    order: list[int] = []

    async def ask(number: int) -> None:
        async with door.slot():
            order.append(number)
            assert door.running == 1

    async with door.slot():
        tasks = [asyncio.create_task(ask(number)) for number in range(5)]
        await until(lambda: door.queued == 5)
        tasks[2].cancel()
        await until(lambda: door.queued == 4)
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [0, 1, 3, 4]
    assert (door.running, door.queued) == (0, 0)


async def test_refill_lets_requests_in_while_others_take_long() -> None:
    seen: list[bool] = []
    door = Admission(1, 1, 20.0, refill_per_s=50, observe=seen.append)
    async with door.slot(), door.slot(), door.slot():
        assert door.running == 3
    assert seen == [True, True, True]


async def test_a_full_queue_refuses_even_while_tokens_refill() -> None:
    seen: list[bool] = []
    door = Admission(1, 1, 20.0, refill_per_s=0.01, observe=seen.append)
    async with door.slot():
        waiting = asyncio.create_task(door.slot().__aenter__())
        await until(lambda: door.queued == 1)
        with pytest.raises(RouterError) as error:
            async with door.slot():
                pass
        assert error.value.status == 429
        waiting.cancel()
        await asyncio.wait({waiting})
    assert seen == [True, False]


async def test_the_doors_decisions_are_counted() -> None:
    flags = ("--max-concurrent-requests", "1", "--queue-size", "0")
    async with cluster(*flags) as c:
        c.decode[0].gate.close()
        inside = asyncio.create_task(c.generate(text="a"))
        await c.decode[0].gate.arrived(1)
        assert (await c.generate(text="b"))[0] == 429
        c.decode[0].gate.open()
        assert (await inside)[0] == 200
        text = c.server.metrics.render().decode()
    assert 'smg_http_rate_limit_total{result="allowed"} 1.0' in text
    assert 'smg_http_rate_limit_total{result="rejected"} 1.0' in text
    assert 'sbs_refusals_total{cause="front_door"} 1.0' in text


# Workers ----------------------------------------------------------------------------------------


async def test_workers_can_be_changed() -> None:
    async with cluster() as c:
        worker = c.server.registry.of_role("prefill")[0]
        url = f"{c.url}/workers/{worker.id}"
        body = {"priority": 7, "cost": 2.5, "labels": {"zone": "a"}, "unknown": 1}
        async with c.client.put(url, json=body) as response:
            assert response.status == 202
            assert await response.json() == {
                "status": "accepted",
                "worker_id": worker.id,
                "message": "Worker update queued for background processing",
            }
        async with c.client.get(url) as response:
            shown = await response.json()
        assert (shown["priority"], shown["cost"]) == (7, 2.5)
        assert shown["metadata"]["zone"] == "a"


@pytest.mark.parametrize(
    "body", [{"priority": "x"}, {"priority": -1}, {"cost": []}, {"labels": {"a": 1}}, [], "x"]
)
async def test_bad_changes_are_400_and_change_nothing(body: Any) -> None:
    async with cluster(wait=False) as c:
        worker = c.server.registry.of_role("prefill")[0]
        async with c.client.put(f"{c.url}/workers/{worker.id}", json=body) as response:
            assert response.status == 400
        assert (worker.priority, worker.cost, worker.labels) == (50, 1.0, {})


async def test_worker_ids_are_uuids() -> None:
    async with cluster(wait=False) as c:
        for method in ("GET", "PUT", "DELETE"):
            for worker_id, status, code in (
                ("xyz", 400, "BAD_REQUEST"),
                ("00000000-0000-0000-0000-000000000000", 404, "WORKER_NOT_FOUND"),
            ):
                url = f"{c.url}/workers/{worker_id}"
                async with c.client.request(method, url, json={}) as response:
                    assert (response.status, (await response.json())["code"]) == (status, code)


async def test_adding_a_worker_again_is_accepted_and_adds_nothing() -> None:
    async with cluster(wait=False) as c:
        worker = c.server.registry.of_role("decode")[0]
        async with c.post("/workers", {"url": worker.url, "worker_type": "decode"}) as response:
            assert response.status == 202
            assert (await response.json())["worker_id"] == worker.id
        async with c.post("/workers", {"url": worker.url, "worker_type": "prefill"}) as response:
            assert response.status == 400
        assert len(c.server.registry) == 2


async def test_a_model_can_be_asked_for_by_name() -> None:
    async with cluster() as c:
        async with c.get("/v1/models") as response:
            (listed,) = (await response.json())["data"]
        assert listed["root"] == listed["id"] == "mock"
        assert listed["max_model_len"] > 0
        async with c.get("/v1/models/mock") as response:
            assert await response.json() == listed
        async with c.get("/v1/models/org/other") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "model_not_found"


async def test_health_generate_runs_once_however_many_ask() -> None:
    async with cluster() as c:
        c.prefill[0].freeze()
        url = c.url + "/health_generate"

        async def ask() -> int:
            async with c.client.get(url) as response:
                return response.status

        tasks = [asyncio.create_task(ask()) for _ in range(5)]
        await until(lambda: c.server.metrics.http_active._value.get() == 5)
        c.prefill[0].thaw()
        assert [await task for task in tasks] == [200] * 5
        assert c.prefill[0].hits["/health_generate"] == 1


async def test_a_client_gone_does_not_end_health_generate_for_others() -> None:
    async with cluster() as c:
        c.prefill[0].freeze()
        async with aiohttp.ClientSession() as session:
            gone = asyncio.create_task(session.get(c.url + "/health_generate"))
            stays = asyncio.create_task(c.client.get(c.url + "/health_generate"))
            await until(lambda: c.server.metrics.http_active._value.get() == 2)
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        await until(lambda: c.server.metrics.http_active._value.get() == 1)
        c.prefill[0].thaw()
        assert (await stays).status == 200


# Web pages of elsewhere --------------------------------------------------------------------------


async def test_a_page_whose_name_was_turned_to_the_router_changes_nothing() -> None:
    """DNS rebinding: for the browser its origin is the router's own."""
    page = "http://page.example:1"
    async with cluster() as c:

        async def status(host: str, origin: str | None = None) -> int:
            headers = {"Host": host} | ({} if origin is None else {"Origin": origin})
            async with c.post("/flush_cache", {}, headers=headers) as response:
                return response.status

        for host in ("127.0.0.1:1", "[::1]:1", "localhost:1", "10.0.0.9", socket.gethostname()):
            assert await status(host, f"http://{host}") == 200
        assert await status("page.example:1", page) == 403
        assert await status("[page:1", "http://[page:1") == 403
        assert await status("page.example:1") == 200  # no browser: a page has an origin
    async with cluster("--cors-allowed-origins", page) as c:
        assert await status("page.example:1", page) == 200


ADD = b'{"url": "http://127.0.0.1:9", "worker_type": "prefill"}'


@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
async def test_pages_of_elsewhere_change_nothing_where_no_key_is_wanted(
    origin: str, content_type: str
) -> None:
    """A browser sends text/plain without asking first, for whoever's page is open in it."""
    async with cluster() as c:
        headers = {"Origin": origin, "Content-Type": content_type}
        worker = next(iter(c.server.registry))
        for method, path in (
            ("POST", "/workers"),
            ("PUT", f"/workers/{worker.id}"),
            ("DELETE", f"/workers/{worker.id}"),
            ("POST", "/flush_cache"),
            ("POST", "/abort_request"),
        ):
            async with c.client.request(
                method, c.url + path, data=ADD, headers=headers
            ) as response:
                assert response.status == 403
                assert response.headers["X-SMG-Error-Code"] == "cross_origin_request"
                assert "--cors-allowed-origins" in await response.text()
        assert len(c.server.registry) == 2
        # What they may see and ask is as ever.
        async with c.client.get(c.url + "/workers", headers=headers) as response:
            assert response.status == 200


@pytest.mark.parametrize(
    ("flags", "origin"),
    [
        ((), None),
        ((), "own"),
        (("--cors-allowed-origins", "http://ops.example"), "http://ops.example"),
        (("--api-key", "k"), "http://evil.example"),
    ],
)
async def test_tools_own_pages_and_allowed_ones_add_workers(
    flags: tuple[str, ...], origin: str | None
) -> None:
    async with cluster(*flags) as c:
        headers = {"Authorization": "Bearer k", "Content-Type": "text/plain"}
        if origin is not None:
            headers["Origin"] = c.url if origin == "own" else origin
        async with c.client.post(c.url + "/workers", data=ADD, headers=headers) as response:
            assert response.status == 202
