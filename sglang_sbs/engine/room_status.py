"""Prevents a race between two threads of SGLang's prefill from losing a handshake.

``CommonKVManager.update_status`` (``disaggregation/common/conn.py`` of 0.5.23) reads a request's
status, then writes; the scheduler and the thread that receives from decode both call it. If the
interpreter switches threads in between, "handshake" overwrites decode's answer, and the request
waits for its timeout of 300 s. This is frequent with a router that sends both legs at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TAKEN_IN = 2
OPENING = (1, TAKEN_IN)
"""Statuses of an open handshake: ``KVPoll.Bootstrapping``, ``KVPoll.WaitingForInput``
(``disaggregation/base/conn.py``)."""
# SGLang fault: lost-handshake
_one_at_a_time = threading.Lock()


def around_update_status(
    original: Callable[..., Any], manager: Any, bootstrap_room: int, status: int
) -> Any:
    """Hook around ``CommonKVManager.update_status``. Later statuses send messages inside the call,
    so they must not hold the lock. A failure that a third thread writes in between can be lost, as
    without the hook."""
    if status not in OPENING:
        return original(manager, bootstrap_room, status)
    with _one_at_a_time:
        return original(manager, bootstrap_room, status)
