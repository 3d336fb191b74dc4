"""KV events in a running router: the scheduler receives them, and the metrics show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.kv_cluster import RANKS, publishing
from router_harness import cluster, until
from router_processes import site, start_group

from sglang_sbs.router.processes.summed_metrics import add_pages
from sglang_sbs.scheduling import Scheduler
from sglang_sbs.scheduling.eventlog import read_event_log
from sglang_sbs.scheduling.events import BlocksCleared, BlocksRemoved, BlocksStored
from tools.stand_ins.kv_publisher import removed, stored
from tools.stand_ins.mock_engine import Behaviour, MockEngine


async def test_the_scheduler_receives_them_and_the_metrics_show_it() -> None:
    info: dict[str, Any] = {}
    async with publishing(info) as (first, second), cluster() as here:
        engine = MockEngine("prefill", dp_size=RANKS, server_info=info)
        await engine.start()
        first.publish(stored(1, 2))
        body = {"url": engine.url, "worker_type": "prefill", "bootstrap_port": 9000}
        async with here.post("/workers", body) as response:
            assert response.status < 300, await response.text()
        await until(lambda: here.scheduler.of(BlocksStored))
        await until(lambda: second.replays)  # or the past of the rank is all that arrives
        second.publish(stored(5), removed(5))
        await until(lambda: here.scheduler.of(BlocksRemoved))
        event = here.scheduler.of(BlocksRemoved)[0]
        assert (event.instance, event.dp_rank, event.blocks) == (engine.url, 1, [5])
        up = here.scheduler.up[engine.url]
        assert (up.prefix_source, up.page_size) == ("events", 4)
        assert here.scheduler.up[here.prefill[0].url].prefix_source == "approximate"
        assert here.scheduler.up[here.decode[0].url].prefix_source == "off"  # has no radix cache
        page = here.server.metrics.render().decode()
        assert f'sbs_prefix_events_total{{dp_rank="1",worker="{engine.url}"}} 1.0' in page
        assert f'sbs_prefix_source{{source="events",worker="{engine.url}"}} 1.0' in page
        worker = here.server.registry.get(engine.url)
        assert worker is not None
        async with here.client.delete(f"{here.url}/workers/{worker.id}") as response:
            assert response.status < 300
        await until(lambda: engine.url not in here.scheduler.up)
        assert engine.url not in here.server.metrics.render().decode()
        await engine.stop()


async def test_predicted_and_reported_hits_are_compared() -> None:
    async with cluster() as here:
        here.prefill[0].behaviour = Behaviour(prompt_tokens=100, cached_tokens=48)
        assert (await here.generate(input_ids=list(range(100))))[0] == 200
        await here.settled()
        page = here.server.metrics.render().decode()
    assert "sbs_prefix_prompt_tokens_total 100.0" in page
    assert "sbs_prefix_predicted_tokens_total 0.0" in page
    assert "sbs_prefix_reported_tokens_total 48.0" in page
    assert 'sbs_prefix_hit_error_tokens_bucket{le="0.0"} 0.0' in page
    assert 'sbs_prefix_hit_error_tokens_bucket{le="64.0"} 1.0' in page
    assert 'sbs_prefix_hit_error_tokens_bucket{le="64.0"} 2.0' in add_pages([page, page])


async def test_a_flush_through_the_router_is_known_at_once() -> None:
    async with cluster(prefill=2) as here:
        async with here.post("/flush_cache", {}) as response:
            assert response.status == 200
        cleared = {(event.instance, event.dp_rank) for event in here.scheduler.of(BlocksCleared)}
        assert cleared == {
            *((engine.url, rank) for engine in here.prefill for rank in range(2)),
            *((here.decode[0].url, rank) for rank in range(4)),
        }


async def test_with_several_processes_the_scheduler_process_listens(tmp_path: Path) -> None:
    log = tmp_path / "events"
    info: dict[str, Any] = {}
    async with publishing(info) as (first, second), site() as engines:
        engines.prefill[0]._server_info |= info
        first.publish(stored(1, 2))
        flags = ["--port", "0", "--workers", "2", "--sbs-event-log", str(log)]
        group = await start_group(*engines.flags, *flags)
        try:
            await engines.ready(group)
            await second.subscribed()
            second.publish(stored(3))
            url = engines.prefill[0].url
            for rank in range(RANKS):
                series = f'sbs_prefix_events_total{{dp_rank="{rank}",worker="{url}"}}'
                await engines.shows(group, series, 1.0)
            async with engines.client.post(group.url + "/flush_cache") as response:
                assert response.status == 200
            await engines.shows(group, "sbs_prefix_index_blocks", 0.0)
        finally:
            await group.end()
    records = list(read_event_log(log))
    stored_events = [r.event for r in records if isinstance(r.event, BlocksStored)]
    assert [(event.instance, event.dp_rank, event.blocks) for event in stored_events] == [
        (url, 0, [1, 2]),
        (url, 1, [3]),
    ]
    flushed = [r.event for r in records if isinstance(r.event, BlocksCleared)]
    assert {(url, rank) for rank in range(RANKS)} <= {(e.instance, e.dp_rank) for e in flushed}
    config = records[0].config
    assert config is not None
    again = Scheduler(config)
    for record in records[1:]:
        assert record.event is not None
        assert again.handle(record.event, record.now_s) == record.commands
