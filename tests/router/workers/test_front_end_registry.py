"""The registry of a front end mirrors that of the scheduler."""

from __future__ import annotations

from registry_setup import Setup

from sglang_sbs.router.options.config import BreakerConfig
from sglang_sbs.router.processes.mirrored_registry import MirroredRegistry, state_of
from sglang_sbs.router.workers.server_info import (
    KvEventsBlock,
)
from sglang_sbs.router.workers.worker import WorkerEvents


def test_a_front_end_knows_that_kv_events_name_pages_but_looks_for_no_prefixes_alone() -> None:
    setup = Setup()
    worker = setup.up("http://p:1", page_size=16, kv_events=KvEventsBlock(port=1))
    mirror = MirroredRegistry(WorkerEvents(), BreakerConfig(), prefix_source="auto")
    mirror.follow([state_of(worker, setup.now_s)])
    assert [bool(mirror.kv_events_of(worker)) for worker in mirror] == [True]
    assert [up.prefix_source for up in mirror.announcements()] == ["off"]


def test_a_front_end_keeps_what_it_found_out_itself() -> None:
    setup = Setup()
    worker = setup.up("http://p:1")
    mirror = MirroredRegistry(WorkerEvents(), BreakerConfig())
    setup.registry.report_problem(worker, "role", "reported by the scheduler")
    mirror.follow([state_of(worker, 0.0)])
    (seen,) = mirror
    mirror.report_problem(seen, "tokenizer", "found here")
    worker.problems.clear()
    mirror.follow([state_of(worker, 0.0)])
    assert seen.problems == {"tokenizer": "found here"}
