"""Cutting engines' streams into events, however they come."""

from __future__ import annotations

import itertools
import time
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.errors import EventTooLarge
from sglang_sbs.router.relay import merged_answers
from sglang_sbs.router.relay.merged_answers import SseSplitter, event_sink, sse


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


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 30))
def test_long_events_say_what_short_ones_would(bodies: list[bytes], piece: int) -> None:
    raw = b"".join(b"\ndata: %b\n\n" % body.replace(b"\n", b"") for body in bodies)
    wanted = SseSplitter().feed(raw)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(merged_answers, "SHORT_BYTES", 10)
        splitter = SseSplitter()
        found = [splitter.feed(raw[at : at + piece]) for at in range(0, len(raw), piece)]
    assert [bytes(one).strip() for group in found for one in group] == wanted


def test_a_long_event_is_not_copied() -> None:
    """Of sixteen megabytes each copy would hold up others for some milliseconds."""
    pushed: list[bytes | memoryview] = []
    sink = event_sink(sse, pushed.append)
    text = b"x" * (8 << 20)
    tracemalloc.start()
    try:
        sink(b'data: {"choices":[{"delta":{"content":"%b"}}],"a":1}\n' % text)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        sink(b"\n")
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert taken < len(text) // 4
    assert orjson.loads(b"".join(pushed).removeprefix(b"data: "))["a"] == 1


def test_an_event_without_end_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(merged_answers, "MAX_EVENT_BYTES", 1000)
    splitter = SseSplitter()
    splitter.feed(b"data: " + b"x" * 900)
    with pytest.raises(EventTooLarge):
        splitter.feed(b"x" * 200)
