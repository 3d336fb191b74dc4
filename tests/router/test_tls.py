"""HTTPS towards clients and towards engines."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from router_harness import TIMEOUT_S, cluster, sse_events, until

from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.config import USUAL_PACE
from sglang_sbs.router.options.options import parse_flags
from sglang_sbs.router.options.router_options import RouterOptions
from sglang_sbs.router.options.tls import server_ssl, worker_ssl
from sglang_sbs.router.server import RouterServer
from tools.stand_ins.mock_engine import MockEngine, Rooms


def test_both_sides_over_tls_with_uvloop(certificate: tuple[Path, Path]) -> None:
    """The router runs on uvloop: its transports are other objects than asyncio's."""
    uvloop.run(over_tls(certificate))


async def test_both_sides_over_tls(certificate: tuple[Path, Path]) -> None:
    await over_tls(certificate)


async def over_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    serving.load_verify_locations(cert)  # engines want to know who calls, too
    serving.verify_mode = ssl.CERT_REQUIRED
    rooms = Rooms()
    prefill, decode = MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)
    for engine in (prefill, decode):
        await engine.start(tls=serving)
        assert engine.url.startswith("https://")
    options = parse_flags(
        [
            *("--prefill", prefill.url, "9000", "--decode", decode.url),
            *("--host", "127.0.0.1", "--port", "0", "--sbs-endforward-bind", "none"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", "0"),
            *("--policy", "round_robin", "--ca-cert-paths", str(cert)),
            *("--client-cert-path", str(cert), "--client-key-path", str(key)),
            *("--tls-cert-path", str(cert), "--tls-key-path", str(key)),
        ]
    )
    server = RouterServer(options)
    await server.start()
    trusting = ssl.create_default_context(cafile=str(cert))
    connector = aiohttp.TCPConnector(ssl=trusting)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        await until(lambda: server.registry.ready)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:

            async def ask(stream: bool) -> bytes:
                url = f"https://127.0.0.1:{server.port}/generate"
                async with client.post(url, json={"text": "x", "stream": stream}) as response:
                    assert response.status == 200
                    return await response.read()

            plain, streamed = await asyncio.gather(ask(False), ask(True))
            assert b"t1 t2 t3" in plain
            assert sse_events(streamed)[-1] == "[DONE]"
            # What goes on to aiohttp does so with its TLS.
            async with client.get(f"https://127.0.0.1:{server.port}/health") as response:
                assert response.status == 200
            assert b"t1 t2 t3" in await ask(False)
            assert all(
                wait.patience_s != USUAL_PACE.grace_s for wait in server.doorman._waiting.values()
            )
        assert prefill.requests[0].body["bootstrap_host"] == "127.0.0.1"
    finally:
        await server.stop(grace_s=0.0)
        await prefill.stop()
        await decode.stop()


def test_silent_connections_before_tls_lock_nobody_out(certificate: tuple[Path, Path]) -> None:
    """It holds on uvloop, which the router runs on, and on asyncio's own loop."""
    for factory in (uvloop.new_event_loop, asyncio.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(silent_before_tls(certificate))


class CountedHandshakes:
    """An event loop that counts the TLS handshakes it begins."""

    def __init__(self, loop: Any) -> None:
        self.loop, self.begun = loop, 0

    def __getattr__(self, name: str) -> Any:
        self.begun += name == "connect_accepted_socket"
        return getattr(self.loop, name)


async def silent_before_tls(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    flags = ("--tls-cert-path", str(cert), "--tls-key-path", str(key))
    async with cluster(*flags, wait=False) as c:
        c.server.doorman._most = 20
        port: Any = c.server._listening[0]
        counted = port._loop = CountedHandshakes(port._loop)
        silent = [await asyncio.open_connection("127.0.0.1", c.server.port) for _ in range(50)]
        await until(lambda: sum(reader.at_eof() for reader, _ in silent) == 30)
        assert all(reader.at_eof() for reader, _ in silent[:30]), "the oldest go"
        url = f"https://127.0.0.1:{c.server.port}/liveness"
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=str(cert)))
        async with (
            aiohttp.ClientSession(connector=connector) as client,
            client.get(url) as response,
        ):
            assert response.status == 200
        for _, writer in silent:
            writer.close()
        await until(lambda: not c.server.doorman._waiting)
        assert counted.begun == 1, "who says nothing gets no TLS objects, nor who leaves so"


# Who trusts whom ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a CA (``ca.pem``) and what it signed: ``server.pem``, ``client.pem``, keys."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("authority")

    def make(name: str, *extensions: str) -> None:
        by = () if name == "ca" else ("-CA", "ca.pem", "-CAkey", "ca.key")
        command = [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}", *by),
            *(word for extension in extensions for word in ("-addext", extension)),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem"),
        ]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)

    make("ca", "keyUsage=critical,keyCertSign,cRLSign")
    leaf = "basicConstraints=critical,CA:FALSE"
    make("server", leaf, "extendedKeyUsage=serverAuth", "subjectAltName=IP:127.0.0.1")
    make("client", leaf, "extendedKeyUsage=clientAuth")
    make("stranger", leaf, "extendedKeyUsage=serverAuth", "subjectAltName=DNS:elsewhere.example")
    return folder


CA = "--ca-cert-paths ca.pem"
CLIENT = "--client-cert-path client.pem --client-key-path client.key"


@pytest.mark.parametrize(
    ("engine", "asks_who_calls", "flags", "served"),
    [
        ("server", True, f"{CA} {CLIENT}", True),
        ("server", True, CA, False),
        ("server", False, CA, True),
        ("server", False, f"{CA} {CLIENT}", True),
        ("server", False, "", False),
        ("stranger", False, CA, False),
    ],
    ids=["mtls", "no client certificate", "server only", "unasked", "unknown CA", "other name"],
)
async def test_engine_certificates_are_verified_as_configured(
    authority: Path, engine: str, asks_who_calls: bool, flags: str, served: bool
) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(authority / f"{engine}.pem", authority / f"{engine}.key")
    if asks_who_calls:
        tls.load_verify_locations(authority / "ca.pem")
        tls.verify_mode = ssl.CERT_REQUIRED
    words = [str(authority / w) if w.endswith((".pem", ".key")) else w for w in flags.split()]
    async with cluster(*words, real=True, tls=tls, wait=served) as c:
        if not served:
            await until(lambda: all("unreachable" in w.problems for w in c.server.registry))
        answers = [c.post("/generate", {"text": "x", "stream": turn % 2 == 1}) for turn in range(6)]
        for response in await asyncio.gather(*answers):
            assert response.status == (200 if served else 503)
            assert (b"t1" in await response.read()) is served
        assert len(c.prefill[0].requests) == (6 if served else 0)


# Files that cannot be used ------------------------------------------------------------------------

PD = ("--prefill", "http://p0:1", "1", "--decode", "http://d0:1", "--sbs-endforward-bind", "none")


def options_with(**paths: Path | tuple[Path, ...] | None) -> RouterOptions:
    return replace(parse_flags(PD), **paths)  # type: ignore[arg-type]


def test_files_that_cannot_be_used_are_named_with_their_flag(authority: Path) -> None:
    gone, ca = authority / "gone.pem", authority / "ca.pem"
    client, key = authority / "client.pem", authority / "client.key"
    locked = authority / "locked.key"
    lock = ["openssl", "pkey", "-in", str(key), "-aes128", "-passout", "pass:x", "-out"]
    subprocess.run([*lock, str(locked)], check=True, capture_output=True)

    def refusal(options: RouterOptions) -> str:
        with pytest.raises(ValueError, match=r"^--") as raised:
            (server_ssl if options.tls_cert_path else worker_ssl)(options)
        return str(raised.value)

    missing = "No such file"
    assert (
        refusal(options_with(ca_cert_paths=(ca, gone)))
        == f"--ca-cert-paths {gone}: {missing} or directory"
    )
    assert refusal(options_with(client_cert_path=gone)).startswith(
        f"--client-cert-path {gone}: {missing}"
    )
    assert f"--tls-key-path {gone}: {missing}" in refusal(
        options_with(tls_cert_path=client, tls_key_path=gone)
    )
    assert "certificate in PEM form" in refusal(options_with(ca_cert_paths=(key,)))
    for pair in ((ca, key), (client, None), (key, key)):
        text = refusal(options_with(client_cert_path=pair[0], client_key_path=pair[1]))
        assert f"--client-cert-path {pair[0]}" in text and "belongs to it" in text
    # OpenSSL would ask for the pass phrase at the terminal, and wait.
    text = refusal(options_with(tls_cert_path=client, tls_key_path=locked))
    assert str(locked) in text and "passphrase" in text
    both = authority / "both.pem"
    both.write_bytes(client.read_bytes() + key.read_bytes())
    assert worker_ssl(options_with(client_cert_path=both)) is not None


def test_a_key_without_its_certificate_is_an_error() -> None:
    with pytest.raises(FlagError, match=r"--client-key-path .* --client-cert-path"):
        parse_flags([*PD, "--client-key-path", "key.pem"])
