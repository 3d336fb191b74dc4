"""Two threads of SGLang's prefill that write the status of one request."""

from __future__ import annotations

import threading

from sglang_sbs.engine.room_status import around_update_status

BOOTSTRAPPING, WAITING_FOR_INPUT, TRANSFERRING = 1, 2, 3
ROOM = 7


def test_decodes_answer_is_not_written_over_by_who_opens_the_room() -> None:
    rooms: dict[int, int] = {}
    answer = threading.Thread(
        target=lambda: around_update_status(update_status, rooms, ROOM, WAITING_FOR_INPUT)
    )

    def update_status(rooms: dict[int, int], room: int, status: int) -> None:
        """Update a status like SGLang, with a change of threads at the worst moment."""
        current = rooms.get(room)
        if status == BOOTSTRAPPING:
            answer.start()
            answer.join(0.2)
        rooms[room] = status if current is None else max(current, status)

    around_update_status(update_status, rooms, ROOM, BOOTSTRAPPING)
    answer.join()
    assert rooms == {ROOM: WAITING_FOR_INPUT}


def test_a_later_status_may_write_others_from_within() -> None:
    written: list[int] = []

    def update_status(manager: list[int], room: int, status: int) -> str:
        if status == TRANSFERRING:
            around_update_status(update_status, manager, room, WAITING_FOR_INPUT)
        manager.append(status)
        return "SGLang's own"

    assert around_update_status(update_status, written, ROOM, TRANSFERRING) == "SGLang's own"
    assert written == [WAITING_FOR_INPUT, TRANSFERRING]
