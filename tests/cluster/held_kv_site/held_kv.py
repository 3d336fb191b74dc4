"""SGLang plugin that makes one write of KV wait for a test (``test_stale_kv.py``).

A folder is the line between the test and the engines; each file in it is an event:

- ``hold``: the test wants the next write held. The prefill engine that has one renames it to
- ``held``: the write is about to begin and waits for
- ``go``: the test lets it begin. Decode makes no further pass until
- ``written``: the write is over.

Decode says besides that a request with a prefill waits for pages that another one has:

- ``waits-for-transfer``: one whose KV is on its way.
- ``waits-for-release``: one that was aborted and keeps them, as with deferred release.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FOLDER = "SGLANG_SBS_TEST_HELD_KV"
_PATIENCE_S = 120.0
"""A test that needs longer has failed."""


def register() -> None:
    """Wrap the write of KV on prefill and the passes of decode."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
    from sglang.srt.managers.scheduler import Scheduler

    folder = Path(os.environ[FOLDER])
    send, run_batch = MooncakeKVManager.send_kvcache, Scheduler.run_batch
    pop_preallocated = DecodePreallocQueue.pop_preallocated

    def send_when_let(manager: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            (folder / "hold").rename(folder / "held")
        except FileNotFoundError:
            return send(manager, *args, **kwargs)
        _wait_for(folder / "go")
        try:
            return send(manager, *args, **kwargs)
        finally:
            (folder / "written").touch()

    def run_when_written(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler.disaggregation_mode.value == "decode" and (folder / "go").exists():
            _wait_for(folder / "written")
        return run_batch(scheduler, *args, **kwargs)

    def pop_and_tell(queue: Any, *args: Any, **kwargs: Any) -> Any:
        popped = pop_preallocated(queue, *args, **kwargs)
        if any(request.waiting_for_input for request in queue.queue):
            if queue.transfer_queue.queue:
                (folder / "waits-for-transfer").touch()
            if queue.transfer_queue._deferred_releases:
                (folder / "waits-for-release").touch()
        return popped

    DecodePreallocQueue.pop_preallocated = pop_and_tell
    MooncakeKVManager.send_kvcache = send_when_let
    Scheduler.run_batch = run_when_written


def _wait_for(event: Path) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while not event.exists():
        if time.monotonic() > give_up_s:
            raise TimeoutError(f"no {event.name}")
        time.sleep(0.005)
