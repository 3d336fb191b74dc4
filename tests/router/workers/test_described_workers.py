"""The reading of an engine's /server_info, and of the URL it has."""

from __future__ import annotations

from typing import Any

import pytest
from registry_setup import INFO, Setup

from sglang_sbs.router.engines.urls import alias_key, normalise_worker_url
from sglang_sbs.router.errors import leg_status_failure
from sglang_sbs.router.workers.server_info import (
    UnusableWorker,
    WorkerInfo,
    parse_server_info,
)
from sglang_sbs.router.workers.worker_view import describe_worker, problems_of
from sglang_sbs.scheduling.events import InstanceUp

# /server_info -----------------------------------------------------------------------------------

FLAGS, PLUGIN = "flags in /server_info", "the plugin in /server_info"


def test_attn_dp_size_counts_where_dp_size_is_one() -> None:
    assert parse_server_info(INFO, "prefill").dp_size == 8
    assert parse_server_info(INFO | {"attn_dp_size": 1, "dp_size": 4}, "prefill").dp_size == 4
    assert parse_server_info({"version": "0.5.23"}, "prefill").dp_size == 1


def test_overlap_scheduling_is_on_unless_the_engine_says_otherwise() -> None:
    assert parse_server_info(INFO, "prefill").overlap
    assert not parse_server_info(INFO | {"disable_overlap_schedule": True}, "prefill").overlap


def test_limits_are_per_rank() -> None:
    info = parse_server_info(INFO, "prefill")
    assert info.chunk_tokens == 3072
    assert info.max_running_requests == 128
    states = [{"effective_max_running_requests_per_dp": 100}]
    info = parse_server_info(INFO | {"internal_states": states}, "prefill")
    assert info.max_running_requests == 100
    assert (info.kv_capacity_tokens, info.page_size, info.bootstrap_port) == (50_000, 64, 8998)


@pytest.mark.parametrize(
    ("said", "most"), [(4, 4), (None, 0), (0, 0), (-3, 0), ("8", 0), (True, 0), (1 << 50, 1 << 40)]
)
def test_the_most_requests_of_a_pass_are_per_rank_as_they_stand(said: object, most: int) -> None:
    info = parse_server_info(INFO | {"prefill_max_requests": said}, "prefill")
    assert info.prefill_max_requests == most, "eight ranks, and nothing is divided"


def test_only_a_prefill_worker_is_announced_with_its_most_requests() -> None:
    setup = Setup()
    for url, role in (("http://p:1", "prefill"), ("http://d:1", "decode")):
        worker = setup.up(url, role)
        setup.registry.described(worker, WorkerInfo(dp_size=2, prefill_max_requests=4))
    limits = {e.instance: e.prefill_max_requests for e in setup.events if isinstance(e, InstanceUp)}
    assert limits == {"http://p:1": 4, "http://d:1": 0}


def test_only_a_decode_worker_allocates_late() -> None:
    data = INFO | {"disaggregation_decode_allocation_policy": "prefill_complete"}
    assert not parse_server_info(data, "prefill").allocates_late
    data["disaggregation_mode"] = "decode"
    assert parse_server_info(data, "decode").allocates_late
    data["disaggregation_decode_allocation_policy"] = "early"
    assert not parse_server_info(data, "decode").allocates_late
    setup = Setup()
    worker = setup.registry.add("http://d:1", "decode")
    setup.registry.described(worker, WorkerInfo(dp_size=2, allocates_late=True))
    setup.registry.set_healthy(worker, True)
    assert [e.allocates_late for e in setup.events if isinstance(e, InstanceUp)] == [True]


@pytest.mark.parametrize(
    ("config", "captured"),
    [
        ({"prefill": {"backend": "breakable", "bs": [512, 256]}}, (256, 512)),
        ({"prefill": {"backend": "disabled", "bs": [256]}}, ()),
        ({"prefill": {"bs": [256]}}, ()),
        ({"prefill": {"backend": "full", "bs": [-4, "8", True, 16, 1 << 50]}}, (16, 1 << 40)),
        ({"prefill": {"backend": "full", "bs": None}}, ()),
        ({"prefill": {"backend": "full", "bs": list(range(1, 9999))}}, tuple(range(1, 257))),
        ({"prefill": []}, ()),
        ("full", ()),
        (None, ()),
    ],
)
def test_prefill_graphs_are_read_where_they_are_in_use(config: object, captured: tuple) -> None:
    info = parse_server_info(INFO | {"cuda_graph_config": config}, "prefill")
    assert info.captured_tokens == captured


def test_without_chunking_a_pass_is_limited_by_max_prefill_tokens() -> None:
    data = INFO | {"chunked_prefill_size": -1, "max_prefill_tokens": 16384}
    assert parse_server_info(data, "prefill").chunk_tokens == 16384


@pytest.mark.parametrize("version", ["0.5.4", "0.5.5.post3", "0.4.10.post2"])
def test_engines_too_old_to_be_spoken_to_are_refused(version: str) -> None:
    with pytest.raises(UnusableWorker, match=rf"{version}.*0\.5\.6"):
        parse_server_info(INFO | {"version": version}, "prefill")


@pytest.mark.parametrize(
    "version", ["0.5.6.post2", "0.5.10", "0.5.23rc1", "0.6.0", "1.0", "0.0.0.dev0", "", "main"]
)
def test_newer_and_unreleased_engines_are_used(version: str) -> None:
    assert parse_server_info(INFO | {"version": version}, "prefill").version == version


def test_a_worker_under_the_wrong_flag_is_refused() -> None:
    with pytest.raises(UnusableWorker, match=r"--disaggregation-mode prefill.*--decode"):
        parse_server_info(INFO, "decode")
    with pytest.raises(UnusableWorker, match="--disaggregation-mode null"):
        parse_server_info(INFO | {"disaggregation_mode": "null"}, "decode")


def test_the_plugins_block_is_read() -> None:
    block = {"boot_id": "b", "bind": "tcp://*:7700", "routers": ["tcp://r:7600"], "wire_version": 1}
    sbs = parse_server_info(INFO | {"sbs": block}, "prefill").sbs
    assert sbs is not None
    assert (sbs.boot_id, sbs.bind, sbs.routers) == ("b", "tcp://*:7700", ("tcp://r:7600",))
    assert parse_server_info(INFO | {"sbs": "?"}, "prefill").sbs is None


@pytest.mark.parametrize(
    ("said", "ranks", "source"),
    [
        ({}, "8 ranks", FLAGS),
        (
            {"dwdp_size": 1, "enable_dp_attention": True, "sbs": {"barrier": True}},
            "8 ranks",
            PLUGIN,
        ),
        ({"sbs": {"barrier": "no"}}, "8 ranks", FLAGS),
        ({"dwdp_size": 8, "sbs": {"barrier": False}}, "8 ranks, no barrier (--dwdp-size 8)", FLAGS),
        (
            {"sbs": {"barrier": False}},
            "8 ranks, no barrier (SGLANG_SCHEDULER_SKIP_ALL_GATHER)",
            PLUGIN,
        ),
        (
            {"attn_dp_size": 1, "dp_size": 4, "enable_dp_attention": False},
            "4 ranks, no barrier (no DP attention)",
            FLAGS,
        ),
        (
            {"attn_dp_size": 1, "dp_size": 4, "enable_dp_attention": None},
            "4 ranks, no barrier (no DP attention)",
            FLAGS,
        ),
        ({"attn_dp_size": 4, "enable_dp_attention": None}, "4 ranks", FLAGS),
        ({"attn_dp_size": None, "dp_size": 4, "enable_dp_attention": True}, "4 ranks", FLAGS),
        (
            {"attn_dp_size": 1, "enable_dp_attention": False, "sbs": {"barrier": False}},
            "1 rank",
            "it has one DP rank",
        ),
    ],
)
def test_an_engine_whose_ranks_make_passes_of_their_own_is_recognised(
    said: dict[str, Any], ranks: str, source: str
) -> None:
    setup = Setup()
    worker = setup.registry.add("http://p:1", "prefill")
    setup.registry.described(worker, parse_server_info(INFO | said, "prefill"))
    setup.registry.set_healthy(worker, True)
    (announced,) = setup.events
    assert isinstance(announced, InstanceUp)
    shown = describe_worker(worker, 0.0)
    assert shown["ranks"] == ranks
    assert shown["barrier"] == announced.barrier == ("no barrier" not in ranks)
    assert shown["barrier_source"] == source


# URLs -------------------------------------------------------------------------------------------


def test_one_spelling_per_worker() -> None:
    assert normalise_worker_url("HTTP://Host:30000/") == "http://host:30000"
    assert normalise_worker_url("host") == "http://host:80"
    assert normalise_worker_url("http://[FE80::1]:7") == "http://[fe80::1]:7"
    assert alias_key("http://localhost:5") == alias_key("http://127.0.0.1:5")
    assert alias_key("http://localhost:5") != alias_key("http://localhost:6")
    for bad in ("ftp://x", "http://", "http://x:99999", "http://x/generate"):
        with pytest.raises(ValueError, match="worker URL"):
            normalise_worker_url(bad)


def test_a_worker_that_is_down_tells_why_and_no_other_problem() -> None:
    setup = Setup(threshold=1)
    first, second = setup.up("http://p:1"), setup.up("http://p:2")
    waiting = setup.registry.add("http://p:3", "prefill", 8998)
    for worker in (first, second, waiting):
        setup.registry.report_problem(worker, "loads", "no load polls")
    assert {text for _, text in problems_of(setup.registry)} == {"no load polls"}
    setup.registry.set_healthy(first, False, "nothing listens there")
    problems = problems_of(setup.registry)
    assert problems[0] == (first.url, "nothing listens there")
    assert [url for url, _ in problems].count(first.url) == 1
    setup.registry.set_healthy(first, True)
    setup.registry.leg_failed(leg_status_failure("prefill", second.url, 500, b""))
    assert (second.url, "its circuit breaker is open, as requests to it kept failing") in (
        problems_of(setup.registry)
    )
    assert (waiting.url, "no load polls") in problems_of(setup.registry)
