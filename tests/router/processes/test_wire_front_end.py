"""Messages that may arrive at the scheduler's socket, and messages that may not."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_sbs.router.processes.messages import (
    MAX_ADOPTED,
    MAX_MESSAGE_BYTES,
    TOPIC,
    VERSION,
    Adopted,
    Alive,
    Decisions,
    Hello,
    LegFailed,
    Welcome,
    WorkerState,
    decode_from_scheduler,
    decode_to_scheduler,
    encode,
)
from sglang_sbs.router.workers.server_info import WorkerInfo
from sglang_sbs.scheduling.events import (
    Dispatch,
    PrefillDone,
    Refuse,
    RequestAdopted,
    RequestArrived,
    RequestEnded,
)
from sglang_sbs.wire import MalformedMessage

WORKER = WorkerState(
    url="http://p0:1",
    role="prefill",
    id="x",
    info=msgspec.msgpack.decode(msgspec.msgpack.encode(WorkerInfo(dp_size=2))),
    problems={"a": "b"},
)
PLACED = RequestAdopted(
    rid="a", prompt_tokens=1, prefill="p", prefill_rank=0, decode="d", decode_rank=1
)
DISPATCH = Dispatch(
    rid="a",
    prefill="p",
    prefill_rank=0,
    decode="d",
    decode_rank=1,
    batch=1,
    held_s=0.5,
    reason="",
)
REFUSE = Refuse(rid="a", cause="deadline", retry_after_s=1.0, message="")


@pytest.mark.parametrize(
    "message",
    [
        Hello(version=VERSION, front_end="a", name="b", workers=[WORKER]),
        Alive(),
        Adopted(requests=[PLACED]),
        RequestArrived(rid="a", prompt_tokens=1, max_new_tokens=3, exclude=("x",)),
        RequestArrived(
            rid="a",
            prompt_tokens=1,
            blocks=[-(1 << 63), (1 << 63) - 1],
            block_tokens=64,
            session="s",
        ),
        RequestArrived(rid="a", prompt_tokens=1, priority=-5, ttft_slo_s=0.5, tenant="t"),
        PrefillDone(rid="a"),
        RequestEnded(rid="a", outcome="completed", completion_tokens=0),
        LegFailed(worker="w", leg="decode", status=502, code="c", message="m"),
    ],
)
def test_messages_to_the_scheduler_survive_the_wire(message):
    assert decode_to_scheduler(encode(message)) == message


@pytest.mark.parametrize(
    "message", [Welcome(scheduler="x", workers=[WORKER]), Decisions(commands=[DISPATCH, REFUSE])]
)
def test_messages_to_front_ends_survive_the_wire(message):
    assert decode_from_scheduler(encode(message)) == message


@pytest.mark.parametrize(
    "message",
    [
        RequestArrived(rid="", prompt_tokens=1),
        RequestArrived(rid="a" * 129, prompt_tokens=1),
        RequestArrived(rid="a", prompt_tokens=-1),
        RequestArrived(rid="a", prompt_tokens=1 << 50),
        RequestArrived(rid="a", prompt_tokens=1, max_new_tokens=-5),
        RequestArrived(rid="a", prompt_tokens=1, deadline_s=5.0),
        RequestArrived(rid="a", prompt_tokens=1, exclude=("x",) * 5000),
        RequestArrived(rid="a", prompt_tokens=1, blocks=[1 << 63]),
        RequestArrived(rid="a", prompt_tokens=1, blocks=[0] * 65_537),
        RequestArrived(rid="a", prompt_tokens=1, block_tokens=-1),
        RequestArrived(rid="a", prompt_tokens=1, session="s" * 257),
        RequestArrived(rid="a", prompt_tokens=1, tenant="t" * 65),
        PrefillDone(rid="a", cached_tokens=-1),
        RequestEnded(rid="", outcome="failed"),
        Adopted(requests=[PLACED] * (MAX_ADOPTED + 1)),
        Adopted(requests=[msgspec.structs.replace(PLACED, prefill_rank=-1)]),
    ],
)
def test_what_no_front_end_means_is_malformed(message):
    with pytest.raises(MalformedMessage):
        decode_to_scheduler(encode(message))


def test_only_requests_events_may_be_sent_not_those_of_instances():
    body = msgspec.msgpack.encode({"type": "InstanceDown", "instance": "http://d0:1"})
    with pytest.raises(MalformedMessage):
        decode_to_scheduler([TOPIC, body])


def test_a_worker_is_described_in_the_words_of_every_release():
    """A worker's description by another release is read, and the answer to it has the same
    names."""
    sent = {
        **{"url": "http://p0:1", "role": "prefill", "id": "x", "bootstrap_port": 8998},
        "info": {"dp_size": 2, "sbs": {"boot_id": "b"}, "captured_tokens": [1, 2], "later": 1},
        **{"healthy": True, "breaker": "open", "active": 3, "cost": 2.0, "labels": {"a": "b"}},
        **{"report_age_s": 0.5, "reports": 7, "spelled": 1},
    }
    body = msgspec.msgpack.encode({"type": "Cluster", "workers": [sent]})
    message = decode_from_scheduler([TOPIC, body])
    (said,) = msgspec.msgpack.decode(encode(message)[1])["workers"]
    assert said | {"info": None} == sent | {"info": None}
    assert said["info"]["dp_size"] == 2
    assert said["info"]["sbs"]["boot_id"] == "b"
    assert said["info"]["captured_tokens"] == [1, 2]


def test_fields_of_a_later_version_are_ignored():
    body = msgspec.msgpack.encode({"type": "PrefillDone", "rid": "a", "mood": "good"})
    assert decode_to_scheduler([TOPIC, body]) == PrefillDone(rid="a")


def test_size_is_limited():
    with pytest.raises(MalformedMessage, match="bytes"):
        decode_to_scheduler([TOPIC, b"x" * (MAX_MESSAGE_BYTES + 1)])


@given(st.lists(st.binary(max_size=64), max_size=4))
def test_garbage_raises_nothing_else(frames):
    for decode in (decode_to_scheduler, decode_from_scheduler):
        with pytest.raises(MalformedMessage):
            decode(frames)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 63) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)
NAMES = "rid call url role worker requests workers exclude prompt_tokens version"
FIELDS = st.sampled_from(NAMES.split(" "))
KINDS = st.sampled_from(
    ["Hello", "Adopted", "RequestArrived", "RequestEnded", "AddWorker", "LegFailed", "Aborted"]
)


@given(KINDS, st.dictionaries(FIELDS, VALUES))
def test_wrong_fields_give_a_message_or_malformed(kind, fields):
    body = msgspec.msgpack.encode({"type": kind, **fields})
    try:
        message = decode_to_scheduler([TOPIC, body])
    except MalformedMessage:
        return
    assert decode_to_scheduler(encode(message)) == message
    assert type(message).__name__ == kind
