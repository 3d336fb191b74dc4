"""Cutting engines' streams into events, however they come."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.errors import EventTooLarge
from sglang_sbs.router.relay import merged_answers
from sglang_sbs.router.relay.merged_answers import SseSplitter


@given(
    st.lists(st.sampled_from([b"data: x", b"data: ", b"event: y", b"data: a\nb", b"\n", b""])),
    st.lists(st.integers(0, 200)),
)
def test_the_events_are_the_same_wherever_the_stream_is_cut(
    events: list[bytes], cuts: list[int]
) -> None:
    raw = b"\n\n".join(events)
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    splitter = SseSplitter()
    found = [splitter.feed(raw[start:end]) for start, end in itertools.pairwise(edges)]
    assert [event for group in found for event in group] == SseSplitter().feed(raw)


def test_a_long_event_in_pieces_takes_no_longer_than_its_length() -> None:
    """Joined anew with every piece, this one would take minutes."""
    splitter = SseSplitter()
    data = b"data: " + bytes(15 << 20) + b"\n\n"
    started_s = time.process_time()
    for start in range(0, len(data), 512):
        found = splitter.feed(data[start : start + 512])
        if time.process_time() - started_s > 20:
            pytest.fail("more than a hundred times as long as it should take")
    assert len(found) == 1


def test_an_event_without_end_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(merged_answers, "MAX_EVENT_BYTES", 1000)
    splitter = SseSplitter()
    splitter.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventTooLarge):
        splitter.feed(b"x" * 200)
