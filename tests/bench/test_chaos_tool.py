"""The refusals of `scripts/chaos`, and its reading of the scheduler's state."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.chaos import command
from benchmarks.chaos.run import books


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--faults", "kill-prefill,kill-all"], "--faults: 'kill-all' is not one of kill-prefill"),
        (["--seconds", "0"], "--seconds must be greater than 0"),
        (["--seconds", "nan"], "--seconds must be greater than 0"),
        (["--qps", "1000"], "--qps between 0 and 100"),
        (["--prefill", "1"], "--prefill must be at least 2"),
        (["--election", "order"], "--election: only with --ha"),
    ],
)
def test_says_what_is_wrong_before_anything_starts(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def state(**changed: int) -> dict[str, Any]:
    rank = {"outstanding_requests": 0, "flight_tokens": 0, "running": 0}
    return {
        "queue_requests": 0,
        "in_flight_requests": 0,
        "prefill": [{"ranks": [rank, {**rank, **changed}]}],
        "decode": [{"ranks": [{**rank, **changed}, rank]}],
    }


def test_books_name_what_is_left_over() -> None:
    assert books(state()) == {}
    assert books(state(outstanding_requests=2)) == {"prefill outstanding": 2}
    assert books(state(flight_tokens=70)) == {"prefill flight tokens": 70}
    assert books(state(running=1)) == {"decode running": 1}
    assert books({**state(), "queue_requests": 3, "in_flight_requests": 4}) == {
        "queued": 3,
        "in flight": 4,
    }
