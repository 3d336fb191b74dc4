"""Tokens of an identity provider as keys of the control plane, with an issuer on loopback."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import jwt
import pytest
from harness.jwt_issuer import AUDIENCE, Issuer
from router_harness import cluster

from sglang_sbs.console import extras
from sglang_sbs.router.api.identity import (
    ASK_AGAIN_S,
    KEYS_KEPT_S,
    KEYS_LIVE_S,
    ProviderError,
    SigningKeys,
    TokenCheck,
    TokenError,
)
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.keys import JwtConfig, Principal
from sglang_sbs.router.options.options import parse_flags


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def issuer() -> AsyncIterator[Issuer]:
    provider = Issuer()
    await provider.start()
    yield provider
    await provider.stop()


def flags(issuer: Issuer, *more: str) -> tuple[str, ...]:
    return ("--jwt-issuer", issuer.url, "--jwt-audience", AUDIENCE, *more)


def check_of(issuer: Issuer, clock: Clock | None = None, **more: Any) -> TokenCheck:
    config = JwtConfig(issuer.url, AUDIENCE, **more)
    return TokenCheck(config, SigningKeys(config, clock or Clock()))


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# The router --------------------------------------------------------------------------------------


async def test_a_token_of_an_admin_opens_the_control_plane(issuer: Issuer) -> None:
    async with cluster(*flags(issuer), wait=False) as c:

        async def answer(token: str | None) -> tuple[int, str]:
            headers = {} if token is None else bearer(token)
            async with c.client.get(c.url + "/workers", headers=headers) as response:
                if response.status == 401:
                    assert response.headers["WWW-Authenticate"] == 'Bearer realm="control-plane"'
                return response.status, await response.text()

        assert (await answer(issuer.token()))[0] == 200
        assert await answer(issuer.token(roles=["user"])) == (
            403,
            "Admin role required for control plane access",
        )
        assert await answer(None) == (401, "Missing or invalid Authorization header")
        assert await answer("no-token") == (401, "Invalid authentication token")
        status, text = await answer(issuer.token(exp=int(time.time()) - 60))
        assert (status, text) == (401, "Invalid JWT: Signature has expired")
        async with c.post("/workers", {"url": "http://127.0.0.1:9"}) as response:
            assert response.status == 401
        async with c.get("/health") as response:
            assert response.status == 200
    assert issuer.asked == ["discovery", "keys"]  # once for all of these


async def test_keys_and_tokens_work_side_by_side(issuer: Issuer) -> None:
    keys = ("--control-plane-api-keys", "ops:Operations:admin:a.b.c", "ro:Reader:user:usr")
    async with cluster(*flags(issuer, *keys), wait=False) as c:
        for token, status in (
            ("a.b.c", 200),  # looks like a token, and is a key
            ("usr", 403),
            ("x.y.z", 401),
            (issuer.token(), 200),
        ):
            async with c.client.get(c.url + "/workers", headers=bearer(token)) as response:
                assert response.status == status, token


async def test_tokens_do_not_open_inference(issuer: Issuer) -> None:
    async with cluster(*flags(issuer, "--api-key", "api")) as c:
        for key, status in ((issuer.token(), 401), ("api", 200)):
            url = c.url + "/generate"
            async with c.client.post(url, json={"text": "x"}, headers=bearer(key)) as response:
                assert response.status == status


async def test_without_the_provider_nobody_gets_in(issuer: Issuer) -> None:
    token = issuer.token()
    issuer.status = 500
    async with cluster(*flags(issuer), "--api-key", "api", wait=False) as c:
        for key, status in ((token, 503), ("api", 401)):
            async with c.client.get(c.url + "/workers", headers=bearer(key)) as response:
                assert response.status == status


async def test_the_audit_log_says_who_it_was(issuer: Issuer, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="sglang_sbs.audit")
    token = issuer.token(name="Alice\nadmin")
    async with cluster(*flags(issuer), "--control-plane-audit-enabled", wait=False) as c:
        for key in (token, issuer.token(sub="bob", roles=[])):
            async with c.client.get(c.url + "/workers", headers=bearer(key)):
                pass
    lines = [r.getMessage().partition(" ")[2] for r in caplog.records if "audit" in r.name]
    records = [json.loads(line) for line in lines]
    assert [(r["principal"], r["role"], r["outcome"]) for r in records] == [
        ("alice", "admin", "success"),
        ("bob", "user", "denied"),
    ]
    assert all("\n" not in line for line in lines)
    assert token not in caplog.text


# Tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ({"aud": "api://other"}, "Audience"),
        ({"aud": ["a", "b"]}, "Audience"),
        ({"iss": "https://elsewhere.example"}, "issuer"),
        ({"exp": 1}, "expired"),
        ({"nbf": 2**40}, "not yet valid"),
        ({"drop": ("exp",)}, "exp"),
        ({"drop": ("aud",)}, "aud"),
        ({"drop": ("iss",)}, "iss"),
    ],
)
async def test_claims_are_checked(issuer: Issuer, claims: dict[str, Any], words: str) -> None:
    with pytest.raises(TokenError, match=words):
        await check_of(issuer).principal(issuer.token(**claims))


async def test_an_audience_among_several_is_enough_and_clocks_may_differ(issuer: Issuer) -> None:
    token = issuer.token(aud=["x", AUDIENCE], exp=int(time.time()) - 10)
    assert await check_of(issuer).principal(token) == Principal("alice", "", "admin")


async def test_signatures_are_checked(issuer: Issuer) -> None:
    check = check_of(issuer)
    issuer.add_rsa("thief")
    issuer.hidden.add("thief")
    stolen = jwt.encode(
        jwt.decode(issuer.token(), options={"verify_signature": False}),
        issuer.private["thief"],
        algorithm="RS256",
        headers={"kid": "rsa-1"},
    )
    with pytest.raises(TokenError, match=r"[Ss]ignature"):
        await check.principal(stolen)
    head, payload, signature = issuer.token().split(".")
    other = issuer.token(sub="mallory").split(".")[1]
    with pytest.raises(TokenError, match=r"[Ss]ignature"):
        await check.principal(f"{head}.{other}.{signature}")
    with pytest.raises(TokenError):
        await check.principal(f"{head}.{payload}.")


async def test_the_public_key_is_no_secret_to_sign_with(issuer: Issuer) -> None:
    """Algorithm confusion: HS256 with what everybody may read as the secret; and none at all."""
    claims = jwt.decode(issuer.token(), options={"verify_signature": False})
    forged = jwt.encode(claims, b"x" * 64, algorithm="HS256", headers={"kid": "rsa-1"})
    bare = jwt.encode(claims, None, algorithm="none", headers={"kid": "rsa-1"})
    for token in (forged, bare):
        with pytest.raises(TokenError, match="another algorithm"):
            await check_of(issuer).principal(token)


async def test_symmetric_and_encryption_keys_of_the_provider_are_not_used(issuer: Issuer) -> None:
    issuer.add_rsa("for-encryption")
    issuer.hidden.add("for-encryption")
    public = issuer.private["for-encryption"].public_key()
    published = json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(public))
    issuer.extra = [
        {"kty": "oct", "kid": "shared", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0"},
        published | {"kid": "for-encryption", "use": "enc"},
        {"kty": "RSA", "kid": "broken", "n": "?"},
        "nonsense",
    ]
    check = check_of(issuer)
    assert (await check.principal(issuer.token())).role == "admin"
    with pytest.raises(TokenError, match="does not have"):
        await check.principal(issuer.token("for-encryption"))
    shared = jwt.encode({}, b"secret-secret-secret-secret-sec.", "HS256", headers={"kid": "shared"})
    with pytest.raises(TokenError, match="does not have"):
        await check.principal(shared)


async def test_elliptic_curves(issuer: Issuer) -> None:
    issuer.add_ec("ec-1")
    assert (await check_of(issuer).principal(issuer.token("ec-1"))).id == "alice"


@pytest.mark.parametrize("token", ["", "a.b.c", "..", "e30.e30.e30", "\ufffd.x.y"])
async def test_garbage_is_refused_without_asking_anybody(issuer: Issuer, token: str) -> None:
    with pytest.raises(TokenError):
        await check_of(issuer).principal(token)
    assert issuer.asked == []


@pytest.mark.parametrize(
    ("claims", "mapping", "role"),
    [
        ({"roles": ["admin"]}, {}, "admin"),
        ({"roles": "ADMIN"}, {}, "admin"),
        ({"roles": ["user", "admin"]}, {}, "admin"),
        ({"roles": []}, {}, "user"),
        ({"roles": [], "groups": ["admin"]}, {}, "user"),
        ({"roles": {"admin": True}}, {}, "user"),
        ({"drop": ("roles",)}, {}, "user"),
        ({"drop": ("roles",), "role": "admin"}, {}, "admin"),
        ({"drop": ("roles",), "groups": ["x", "admin"]}, {}, "admin"),
        ({"roles": ["Gateway.Admin"]}, {"Gateway.Admin": "admin"}, "admin"),
        ({"roles": ["admin"]}, {"Gateway.Admin": "admin"}, "user"),
        ({"roles": ["Gateway.User"]}, {"Gateway.User": "user"}, "user"),
    ],
)
async def test_roles(issuer: Issuer, claims: dict[str, Any], mapping: Any, role: str) -> None:
    who = await check_of(issuer, roles=mapping).principal(issuer.token(**claims))
    assert who.role == role


@pytest.mark.parametrize(
    ("claims", "who"),
    [
        ({}, "alice"),
        ({"drop": ("sub",), "email": "a@example.com"}, "a@example.com"),
        ({"drop": ("sub",), "preferred_username": "al"}, "al"),
        ({"drop": ("sub",)}, "unknown"),
    ],
)
async def test_names(issuer: Issuer, claims: dict[str, Any], who: str) -> None:
    assert (await check_of(issuer).principal(issuer.token(**claims))).id == who


# Signing keys ------------------------------------------------------------------------------------


async def test_keys_are_fetched_once_and_again_after_an_hour(issuer: Issuer) -> None:
    clock = Clock()
    check = check_of(issuer, clock)
    await asyncio.gather(*(check.principal(issuer.token()) for _ in range(20)))
    clock.now_s += KEYS_LIVE_S - 1
    await check.principal(issuer.token())
    assert issuer.asked.count("discovery") == 1
    clock.now_s += 2
    await check.principal(issuer.token())
    assert issuer.asked.count("discovery") == 2


async def test_a_rotated_key_is_found_and_a_withdrawn_one_forgotten(issuer: Issuer) -> None:
    clock = Clock()
    check = check_of(issuer, clock)
    old = issuer.token()
    await check.principal(old)
    clock.now_s += ASK_AGAIN_S
    issuer.add_rsa("rsa-2")
    issuer.hidden.add("rsa-1")
    assert (await check.principal(issuer.token("rsa-2"))).id == "alice"
    with pytest.raises(TokenError, match="does not have"):
        await check.principal(old)


async def test_unknown_key_names_do_not_make_the_provider_be_asked_each_time(
    issuer: Issuer,
) -> None:
    clock = Clock()
    check = check_of(issuer, clock)
    issuer.add_rsa("unknown")
    issuer.hidden.add("unknown")
    for _ in range(20):
        with pytest.raises(TokenError, match="does not have"):
            await check.principal(issuer.token("unknown"))
    assert issuer.asked.count("discovery") == 1
    clock.now_s += ASK_AGAIN_S
    with pytest.raises(TokenError):
        await check.principal(issuer.token("unknown"))
    assert issuer.asked.count("discovery") == 2
    await check.principal(issuer.token())


async def test_known_keys_outlast_a_provider_that_is_away_for_a_while(issuer: Issuer) -> None:
    clock = Clock()
    check = check_of(issuer, clock)
    token = issuer.token(exp=int(time.time()) + 86_400)
    await check.principal(token)
    issuer.status = 503
    clock.now_s += KEYS_LIVE_S + 1
    await check.principal(token)
    clock.now_s += KEYS_KEPT_S - KEYS_LIVE_S
    with pytest.raises(ProviderError):
        await check.principal(token)
    with pytest.raises(ProviderError):
        await check.principal(token)
    fetches = issuer.asked.count("discovery")
    clock.now_s += ASK_AGAIN_S
    issuer.status = 200
    await check.principal(token)
    assert issuer.asked.count("discovery") == fetches + 1


async def test_a_provider_that_hangs_is_waited_for_once_and_not_by_each_request(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    check = check_of(issuer, clock)
    token = issuer.token(exp=int(time.time()) + 86_400)
    await check.principal(token)
    clock.now_s += KEYS_LIVE_S + 1
    attempts = 0

    async def hang(_self: SigningKeys) -> None:
        nonlocal attempts
        attempts += 1
        clock.now_s += 2 * ASK_AGAIN_S
        raise TimeoutError

    monkeypatch.setattr(SigningKeys, "_fetch", hang)
    await asyncio.gather(*(check.principal(token) for _ in range(20)))
    assert attempts == 1


async def test_keys_from_a_given_place_need_no_discovery(issuer: Issuer) -> None:
    await check_of(issuer, jwks_uri=f"{issuer.url}/keys").principal(issuer.token())
    assert issuer.asked == ["keys"]


@pytest.mark.parametrize(
    "document",
    [
        {"issuer": "https://elsewhere.example", "jwks_uri": "URL/keys"},
        {"issuer": "URL", "jwks_uri": "http://192.0.2.1/keys"},
        {"issuer": "URL", "jwks_uri": "file:///etc/passwd"},
        {"issuer": "URL"},
        {},
    ],
)
async def test_a_discovery_document_is_not_believed_anything(
    issuer: Issuer, document: dict[str, str]
) -> None:
    issuer.document = {k: v.replace("URL", issuer.url) for k, v in document.items()}
    with pytest.raises(ProviderError):
        await check_of(issuer).principal(issuer.token())
    assert issuer.asked == ["discovery"]


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"keys": 5}', b"x" * (1 << 20) + b"yy"])
async def test_nonsense_instead_of_keys(issuer: Issuer, raw: bytes) -> None:
    issuer.raw = raw
    with pytest.raises(ProviderError):
        await check_of(issuer).principal(issuer.token())


# Flags -------------------------------------------------------------------------------------------


def test_flags_become_a_configuration() -> None:
    options = parse_flags(
        [
            *("--jwt-issuer", "https://login.example.com/t/v2.0", "--jwt-audience", "api://x"),
            *("--jwt-jwks-uri", "https://login.example.com/keys"),
            *("--jwt-role-mapping", "Gateway.Admin=admin", "a=b=USER"),
        ]
    )
    assert options.jwt == JwtConfig(
        "https://login.example.com/t/v2.0",
        "api://x",
        "https://login.example.com/keys",
        {"Gateway.Admin": "admin", "a=b": "user"},
    )
    assert parse_flags([]).jwt is None


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--jwt-issuer", "https://a"], "--jwt-audience NAME belong together"),
        (["--jwt-audience", "a"], "--jwt-issuer URL"),
        (["--jwt-jwks-uri", "https://a"], "belong together"),
        (["--jwt-role-mapping", "a=admin"], "belong together"),
        (["--jwt-issuer", "http://a", "--jwt-audience", "b"], "--jwt-issuer 'http://a' must be"),
        (
            ["--jwt-issuer", "https://a", "--jwt-audience", "b", "--jwt-jwks-uri", "ftp://a"],
            "--jwt-jwks-uri 'ftp://a'",
        ),
        (
            ["--jwt-issuer", "https://a", "--jwt-audience", "b", "--jwt-role-mapping", "x"],
            "--jwt-role-mapping 'x': write PROVIDER_ROLE=admin",
        ),
        (
            ["--jwt-issuer", "https://a", "--jwt-audience", "b", "--jwt-role-mapping", "x=root"],
            "'x=root'",
        ),
    ],
)
def test_mistakes_name_the_flag(argv: list[str], words: str) -> None:
    with pytest.raises(FlagError) as error:
        parse_flags(argv)
    assert words in str(error.value)


def test_without_the_library_the_flags_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    with pytest.raises(FlagError, match=r"pip install 'sglang-sbs\[jwt\]'"):
        parse_flags(["--jwt-issuer", "https://a", "--jwt-audience", "b"])
