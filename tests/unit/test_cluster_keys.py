"""The engines' keys reach the router, and flags after which it could not speak to them do not."""

from __future__ import annotations

import itertools
import shutil
import ssl
import subprocess
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sglang_sbs.cluster.plan import ClusterOptions, ClusterPlan, PlanError, Role, plan_cluster
from sglang_sbs.cluster.readiness import freeze_gc, wait_until_ready
from sglang_sbs.launch_server import main
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions


def plan(**options: Any) -> ClusterPlan:
    defaults = {"model_path": "/m", "log_dir": Path("/logs")}
    return plan_cluster(ClusterOptions(**{**defaults, **options}), itertools.count(20000, 32))


def router_of(planned: ClusterPlan, monkeypatch: pytest.MonkeyPatch) -> RouterOptions:
    """Return the planned router's options from its command line and environment."""
    assert planned.router is not None
    for name, text in planned.router.environment.items():
        monkeypatch.setenv(name, text)
    return parse_flags(planned.router.argv[3:])


@pytest.mark.parametrize(
    ("flags", "api", "worker"),
    [
        (("--api-key", "k1"), "k1", "k1"),
        (("--api-key=k1", "--admin-api-key", "a1"), "k1", "a1"),
        (("--admin-api-key", "a1"), None, "a1"),
    ],
)
def test_the_router_gets_the_engines_keys_in_its_environment_only(
    flags: tuple[str, ...], api: str | None, worker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(engine_flags=flags)
    assert planned.router is not None
    assert not {"k1", "a1"} & {*planned.router.argv}
    router = router_of(planned, monkeypatch)
    assert (router.api_key, router.monitor.api_key, router.worker_key) == (api, api, worker)
    for engine in planned.instances:
        assert (engine.keys.api, engine.keys.operator) == (api or "", worker)
        assert "k1" not in repr(engine.keys)


def test_a_key_of_prefill_alone_is_given_to_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(prefill_flags=("--api-key", "k1"))
    assert router_of(planned, monkeypatch).api_key == "k1"
    assert planned.of_role(Role.DECODE)[0].keys.api == ""


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"prefill_flags": ("--api-key", "k1"), "decode_flags": ("--api-key", "k2")}, "one key"),
        ({"engine_flags": ("--api-key", "k1"), "router_flags": ("--api-key", "k2")}, "one key"),
        (
            {"engine_flags": ("--api-key", "k1"), "decode_flags": ("--admin-api-key", "a1")},
            "--admin-api-key: .*one key",
        ),
        (
            {"engine_flags": ("--api-key", "k1"), "router_flags": ("--admin-api-key", "a1")},
            "--admin-api-key: .*one key",
        ),
        ({"engine_flags": ("--api-key", "k 1")}, "--api-key: a key with spaces"),
        ({"engine_flags": ("--api-ke", "k1")}, "--api-ke: write --api-key"),
        ({"engine_flags": ("--api-key-file", "f")}, "SGLang has no such flag"),
        ({"engine_flags": ("--ssl-keyfile", "f")}, "--ssl-keyfile .*--router-tls-cert-path"),
        ({"decode_flags": ("--ssl-certfile=f",)}, "--ssl-certfile .*--router-tls-cert-path"),
        ({"engine_flags": ("--grpc-mode",)}, "--grpc-mode .*uses HTTP"),
        ({"engine_flags": ("--smg-grpc-mode",)}, "--smg-grpc-mode .*uses HTTP"),
        ({"engine_flags": ("--grpc-port", "1")}, "--grpc-port .*uses HTTP"),
    ],
)
def test_engines_that_the_router_could_not_speak_to_are_refused(
    options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PlanError, match=complaint) as raised:
        plan(**options)
    assert "k1" not in str(raised.value)


def test_a_router_with_tls_is_asked_by_https() -> None:
    planned = plan(router_flags=("--tls-cert-path", "c", "--tls-key-path", "k"), router_port=1)
    assert planned.router is not None
    assert planned.router.url == "https://127.0.0.1:1"


def test_a_dry_run_shows_no_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SGLANG_SBS_API_KEY", raising=False)
    keys = ["--api-key", "zqx1", "--admin-api-key=zqx2"]
    control = ["--router-control-plane-api-keys", "ops:ops:admin:zqx3"]
    main(["--model-path", "/m", "--dry-run", *keys, *control])
    printed = capsys.readouterr().out
    assert "zqx" not in printed
    assert "SGLANG_SBS_API_KEY='***'" in printed.splitlines()[-1]


def test_another_key_in_the_routers_environment_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_SBS_API_KEY", "k2")
    with pytest.raises(SystemExit):
        main(["--model-path", "/m", "--dry-run", "--api-key", "k1"])
    assert "--api-key: the router has one key" in capsys.readouterr().err


async def test_the_launcher_asks_engines_with_their_keys() -> None:
    async def keyed(request: web.Request) -> web.Response:
        wanted = {"/model_info": "Bearer k1", "/freeze_gc": "Bearer a1"}[request.path]
        return web.Response(status=200 if request.headers.get("Authorization") == wanted else 401)

    app = web.Application()
    app.router.add_get("/model_info", keyed)
    app.router.add_post("/freeze_gc", keyed)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            await wait_until_ready(session, url, ("/ready", "/model_info"), 10, "k1")
            await freeze_gc(session, url, "a1")
            with pytest.raises(aiohttp.ClientResponseError):
                await freeze_gc(session, url)
    finally:
        await runner.cleanup()


@pytest.fixture
def elsewhere(tmp_path: Path) -> ssl.SSLContext:
    """A server's certificate of another host."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made += ["-nodes", "-subj", "/CN=llm.example.com", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(made, check=True, capture_output=True, cwd=tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    return context


async def test_a_router_whose_certificate_names_another_host_is_ready(
    elsewhere: ssl.SSLContext,
) -> None:
    async def ready(_request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_get("/readiness", ready)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=elsewhere).start()
        url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            await wait_until_ready(session, url, ("/readiness",), 5)
    finally:
        await runner.cleanup()
