"""Keeps a handshake from being lost between two threads of SGLang's prefill.

``CommonKVManager.update_status`` (``disaggregation/common/conn.py`` of 0.5.23) reads a request's
status, then writes; the scheduler and the thread that hears from decode both call it. If the
interpreter changes threads in between, "handshake" is written over decode's answer, and the request
waits for its time-out, 300 s. A router that sends both legs at once makes the two meet often."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TAKEN_IN = 2
OPENING = (1, TAKEN_IN)
"""``KVPoll.Bootstrapping``, ``KVPoll.WaitingForInput`` (``disaggregation/base/conn.py``)."""
# SGLang fault: lost-handshake
_one_at_a_time = threading.Lock()


def around_update_status(
    original: Callable[..., Any], manager: Any, bootstrap_room: int, status: int
) -> Any:
    """Around ``CommonKVManager.update_status``. Later statuses send messages from within: no lock
    may be held then. A failure that a third thread writes in between can be lost, as before."""
    if status not in OPENING:
        return original(manager, bootstrap_room, status)
    with _one_at_a_time:
        return original(manager, bootstrap_room, status)
