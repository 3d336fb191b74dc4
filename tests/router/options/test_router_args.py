"""The router started from Python, as programs do that import ``sglang_router.launch_router``."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import pickle
import signal
import sys
from typing import Any

import aiohttp
import pytest
from router_harness import TIMEOUT_S, Rooms
from router_processes import Group

from sglang_sbs.launch_router import Router, RouterArgs, launch_router, parse_router_args
from sglang_sbs.router.options.arguments import FlagError
from sglang_sbs.router.options.options import parse_flags
from tools.stand_ins.mock_engine import MockEngine

PD = [
    *("--prefill", "http://p0:30000", "8998", "--prefill", "http://p1:30000", "none"),
    *("--decode", "http://d0:30000", "--decode", "http://d1:30000"),
]
MUCH = [
    *PD,
    *("--pd-disaggregation", "--policy", "round_robin", "--host", "127.0.0.1", "--port", "3001"),
    *("--prometheus-port", "3002", "--prometheus-host", "127.0.0.1", "--log-level", "warn"),
    *("--prometheus-duration-buckets", "0.1", "1", "--request-id-headers", "x-a", "x-b"),
    *("--max-concurrent-requests", "512", "--queue-size", "200", "--queue-timeout-secs", "120"),
    *("--rate-limit-tokens-per-second", "100", "--cors-allowed-origins", "https://a.example"),
    *("--retry-max-retries", "3", "--retry-jitter-factor", "0.1", "--disable-retries"),
    *("--cb-failure-threshold", "5", "--cb-timeout-duration-secs", "30"),
    *("--disable-circuit-breaker", "--health-check-endpoint", "/ready", "--api-key", "secret"),
    *("--control-plane-api-keys", "ops:Operations:admin:a:b", "see:Viewers:user:c"),
    *("--jwt-issuer", "https://id.example", "--jwt-audience", "us"),
    *("--jwt-role-mapping", "Gateway.Admin=admin"),
    *("--service-discovery", "--prefill-selector", "app=x", "role=prefill"),
    *("--decode-selector", "app=x role=decode", "--service-discovery-namespace", "llm"),
    *("--tls-cert-path", "/c.pem", "--tls-key-path", "/k.pem", "--ca-cert-paths", "/a", "/b"),
    *("--cache-threshold", "0.5", "--prefill-policy", "power_of_two", "--dp-aware"),
]
"""A long command line in the form that ``sglang_router`` 0.3.2 takes."""


def plain(value: Any) -> Any:
    """A value without the types in which the two parsers differ."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return str(float(value)) if isinstance(value, int | float) else str(value)


def test_every_field_of_the_stock_class_is_there_and_means_the_same() -> None:
    pytest.importorskip("sglang_router.sglang_router_rs")
    from sglang_router.launch_router import RouterArgs as Stock
    from sglang_router.launch_router import parse_router_args as parse_stock

    theirs = {field.name for field in dataclasses.fields(Stock)}
    assert theirs <= {field.name for field in dataclasses.fields(RouterArgs)}
    stock, unset, ours = parse_stock(MUCH), parse_stock([]), parse_router_args(MUCH)
    given = {name for name in theirs if getattr(stock, name) != getattr(unset, name)}
    assert len(given) > 35
    for name in given | {"worker_urls", "selector", "bootstrap_port_annotation"}:
        theirs_value, value = getattr(stock, name), getattr(ours, name)
        # 0.5 and "0.5": flags without a meaning here are not read.
        assert plain(value) == plain(theirs_value) or float(value) == theirs_value, name


def test_the_command_line_says_what_the_fields_say() -> None:
    # Files and extras that this machine may lack are left to the tests of their flags.
    for argv in (PD, ["--pd-disaggregation"], MUCH[: MUCH.index("--jwt-issuer")]):
        args = parse_router_args(argv)
        assert parse_router_args(args.command_line()) == args
        assert parse_flags(args.command_line()) == parse_flags(argv)
    args = parse_router_args(MUCH)
    assert parse_router_args(args.command_line()) == args
    assert pickle.loads(pickle.dumps(args)) == args
    assert RouterArgs().command_line() == []
    assert parse_router_args(RouterArgs(api_key="-dash").command_line()).api_key == "-dash"
    assert RouterArgs(log_level=None, prometheus_port=None).command_line() == []


def test_another_programs_parser_takes_the_flags_with_a_prefix() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for flag in ("--host", "--port", "--workers", "--policy", "--model-path", "--api-key"):
        parser.add_argument(flag, default="theirs")
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    namespace = parser.parse_args(
        ["--policy", "ppo", *("--router-policy", "random", "--router-decode", "http://d0:1")]
    )
    assert (namespace.policy, namespace.router_policy) == ("ppo", "random")
    args = RouterArgs.from_cli_args(namespace, use_router_prefix=True)
    assert (args.policy, args.decode_urls, args.workers) == ("random", ["http://d0:1"], 1)
    assert args.host == "theirs"  # as with sglang_router: without a prefix, where there is none
    args.host, args.port = "127.0.0.1", 0  # a plain dataclass
    assert "--host=127.0.0.1" in args.command_line()
    assert "--router-host" not in parser.format_help()


def test_a_namespace_made_by_hand_needs_no_more_than_it_changes() -> None:
    args = RouterArgs.from_cli_args(
        argparse.Namespace(prefill=None, decode=[["http://d0:1"]], verbose=False, selector=None)
    )
    assert args == RouterArgs(decode_urls=["http://d0:1"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"policy": "sbz"}, ["--policy 'sbz'", "did you mean sbs"]),
        ({"worker_urls": ["http://w:1"]}, ["--worker-urls", "--prefill"]),
        ({"prefill_urls": [("http://p:1", 99999)]}, ["--prefill", "1..65535"]),
        ({"prefill_urls": [("ftp://p:1", None)]}, ["--prefill", "http://"]),
        ({"queue_size": -1}, ["--queue-size", "whole number"]),
        ({"bootstrap_port_annotation": "x/y"}, ["bootstrap_port_annotation", "sglang.ai"]),
        ({"service_discovery": True}, ["--prefill-selector"]),
    ],
)
def test_bad_values_are_reported_before_anything_starts(fields: dict[str, Any], words: Any) -> None:
    with pytest.raises(FlagError) as raised:
        launch_router(RouterArgs(**fields))
    assert all(word in str(raised.value) for word in words), raised.value


@pytest.mark.parametrize(
    "argv",
    [
        ["--prefill", "http://p:1", "x"],
        ["--prefill", "http://p:1", "1", "2"],
        ["--control-plane-api-keys", "ops:admin"],
        ["--jwt-role-mapping", "Gateway.Admin"],
        ["--prefill-selector", "app"],
    ],
)
def test_bad_words_are_reported_with_their_flag(argv: list[str]) -> None:
    with pytest.raises(FlagError, match=argv[0]):
        parse_router_args(argv)


def test_a_router_that_cannot_start_raises() -> None:
    with pytest.raises(RuntimeError, match="exit code 2"):  # no workers
        Router.from_args(RouterArgs()).start()


PROGRAM = """
import argparse
from sglang_sbs.launch_router import RouterArgs, launch_router
parser = argparse.ArgumentParser()
RouterArgs.add_cli_args(parser, use_router_prefix=True)
args = RouterArgs.from_cli_args(parser.parse_args(), use_router_prefix=True)
args.host, args.port, args.prometheus_host, args.prometheus_port = "127.0.0.1", 0, "127.0.0.1", 0
args.sbs_endforward_bind, args.policy, args.pd_disaggregation = "none", "round_robin", True
launch_router(args)
print("over")
"""


async def test_a_program_starts_an_empty_router_and_adds_workers() -> None:
    rooms = Rooms()
    engines = [MockEngine("prefill", rooms=rooms), MockEngine("decode", rooms=rooms)]
    for engine in engines:
        await engine.start()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROGRAM, "--router-shutdown-grace-period-secs", "1"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    group = Group(process)
    group.reader = asyncio.create_task(group.read())
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        await group.says(r"sglang-sbs \S+: policy ")
        assert group.find("no workers yet.*POST /workers")
        async with aiohttp.ClientSession(group.url, timeout=timeout) as client:
            async with client.get("/workers") as response:
                assert (await response.json())["workers"] == []
            async with client.post("/generate", json={"text": "x"}) as response:
                assert response.status == 503
            added = {}
            for engine in engines:
                worker = {"url": engine.url, "worker_type": engine.role, "bootstrap_port": 9000}
                async with client.post("/workers", json=worker) as response:
                    assert response.status == 202
                    added[engine.url] = (await response.json())["worker_id"]
            async with asyncio.timeout(TIMEOUT_S):
                while (await client.get("/readiness")).status != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with client.post("/generate", json={"text": "x"}) as response:
                assert (response.status, (await response.json())["text"]) == (200, "t1 t2 t3")
            async with client.delete(f"/workers/{added[engines[1].url]}") as response:
                assert response.status == 202
            async with client.get("/workers") as response:
                left = [worker["url"] for worker in (await response.json())["workers"]]
            assert left == [engines[0].url]
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert (await process.stdout.read()).decode().endswith("over\n")
        assert await process.wait() == 0
    finally:
        await group.end()
        for engine in engines:
            await engine.stop()
