"""Events of a stream, as a client reads them."""

from __future__ import annotations

from typing import Any

import orjson


def events_of(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Name and data of each event."""
    events = []
    for block in raw.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))))
    return events
