"""An address at which another server has taken an engine's place, such as that of a proxy."""

from __future__ import annotations

import aiohttp
import orjson
import pytest
from router_harness import until

from sglang_sbs.router.options.config import MonitorConfig
from sglang_sbs.router.workers.health import Monitor
from sglang_sbs.router.workers.registry import Registry

INFO = orjson.dumps({"version": "0.5.23", "disaggregation_mode": "decode", "dp_size": 2})
ENGINE = {"/server_info": INFO, "/ready": b"", "/ping": b""}


class Scripted(Monitor):
    """Gets ``answers`` by path, and 404 for all others."""

    answers: dict[str, bytes] = ENGINE

    async def _get(self, url: str, path: str, timeout_s: float | None = None) -> tuple[int, bytes]:
        return (200, self.answers[path]) if path in self.answers else (404, b"no page; token=k3y")


@pytest.mark.parametrize("checks", [("/ready", "/ping"), ("/ping",)])
async def test_a_worker_whose_server_became_another_one_gets_no_requests(
    checks: tuple[str, ...],
) -> None:
    engine = {path: ENGINE[path] for path in ("/server_info", *checks)}
    registry = Registry()
    worker = registry.add("http://127.0.0.1:1", "decode")
    async with aiohttp.ClientSession() as session:
        config = MonitorConfig(health_interval_s=0.01, fast_s=0.01)
        monitor = Scripted(registry, session, config, lambda event: None)
        monitor.answers = engine
        monitor.start(worker)
        await until(lambda: worker.usable and worker.probe_path == checks[0])
        monitor.answers = {}
        await until(lambda: not worker.usable)
        assert worker.problems["unhealthy"] == "/server_info answers 404: 'no page; token=***'"
        monitor.answers = engine
        await until(lambda: worker.usable)
        # An engine without these checks answers /server_info.
        monitor.answers = {"/server_info": INFO}
        seen = monitor.checks["decode", "success"]
        await until(lambda: monitor.checks["decode", "success"] > seen + 5)
        assert worker.usable
        await monitor.close()
