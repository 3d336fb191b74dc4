"""Inputs nobody wrote down: those of the corpus, changed at random, reproducible by their seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
from hostile_inputs import Input, corpus

from sglang_sbs.wire import EndForward, encode_endforward

_MAX_BYTES = 20_000
"""Largest input that is changed, in bytes: a large one is slow, and its size is what is odd about
it."""
_PIECES = {
    "http": (
        *(b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b",", b"HTTP/1.0", b"HTTP/1.1", b"-1"),
        *(b"Content-Length: 5\r\n", b"Content-Length: 13\r\n", b"Transfer-Encoding: chunked\r\n"),
        *(
            b"Transfer-Encoding: identity\r\n",
            b"Connection: close\r\n",
            b"Expect: 100-continue\r\n",
        ),
        *(b"0\r\n\r\n", b"d\r\n", b";a", b"\xff", b"\x85", b"chunked", b"\r\n\r\n", b"0x", b"+"),
        *(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
            b"Upgrade: h2c\r\n",
        ),
    ),
    "bodies": (
        *(b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"\\ud800", b"null", b"true", b"-1"),
        *(
            b"1e999",
            b"0.1",
            b"9" * 400,
            b"[[[[[[[[",
            b'"n": 3, ',
            b'"stream": true, ',
            b"\0",
            b"\xff",
        ),
        *(b'"text": ["x", "y"], ', b'"input_ids": [[1], [2]], ', b'"rid": "a", ', b"{}", b"[]"),
    ),
    "kv_events": (
        b"\x90",
        b"\xc0",
        b"\x81",
        b"\xdd\xff\xff\xff\xff",
        b"\xa1x",
        b"\xcf" + b"\xff" * 8,
    ),
    "engines": (
        *(
            b"\r\n",
            b"\n",
            b"\0",
            b"HTTP/1.1 200 OK\r\n",
            b"Content-Length: 7\r\n",
            b"data: ",
            b"\n\n",
        ),
        *(
            b"Transfer-Encoding: chunked\r\n",
            b"2\r\n{}\r\n",
            b"0\r\n\r\n",
            b"[DONE]",
            b"null",
            b"[[",
        ),
        *(b'"finish_reason": {"type": "abort"}', b'{"error": []}', b"\xff", b"-1", b"1e999"),
    ),
}
_PIECES["endforward"] = _PIECES["kv_events"]
_COUNTS = (-1, 0, 1, 7, 1000, 10**6, 10**9, 2**40, 2**62)
_COUNTED = (
    *("forward_id", "extend_tokens", "cached_tokens", "batch_size", "inflight_passes"),
    *("inflight_tokens", "waiting_requests", "waiting_tokens", "bootstrapping_requests"),
    *("chunk_remainder_tokens", "kv_transfer_requests", "running_requests", "kv_tokens"),
    *("kv_capacity_tokens", "max_running_requests", "dp_rank", "dp_size"),
)
_SECONDS = (-1.0, 0.0, 1e-9, 0.1, 5.0, 3600.0, 1e300, float("inf"))


def mutated(data: bytes, rng: random.Random, pieces: tuple[bytes, ...]) -> bytes:
    """One to four changes: a byte, a part cut out, a piece put in, a part doubled."""
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(4):
            case 0 if at < len(changed):
                changed[at] = rng.randrange(256)
            case 1:
                del changed[at : at + rng.randrange(1, 12)]
            case 2:
                changed[at:at] = rng.choice(pieces)
            case _:
                changed[at:at] = changed[: rng.randrange(1, 60)]
    return bytes(changed)


def mutations(kind: str, seed: int) -> Iterator[Input]:
    """Without end; the same for the same seed."""
    rng = random.Random(f"{kind} {seed}")
    bases = [given for given in corpus(kind) if len(given.data) <= _MAX_BYTES]
    # A changed URL could be a true one: the router would take the worker, as it should.
    bases = [given for given in bases if given.fields.get("path") != "/workers"]
    number = 0
    while True:
        number += 1
        name = f"{kind} {seed}-{number}"
        if kind == "endforward":
            yield _message(name, rng)
            continue
        base = rng.choice(bases)
        data = base.data
        fields = {k: v for k, v in base.fields.items() if k != "oracles_differ"}
        if kind == "kv_events":
            data = msgspec.msgpack.encode([rng.choice(_SECONDS), fields.get("batch", []), 0])
            fields = {}
        yield replace(
            base,
            name=f"{name}, from {base.name}",
            data=mutated(data, rng, _PIECES[kind]),
            fields=fields,
            expected={},
        )


def _message(name: str, rng: random.Random) -> Input:
    """Return a message of true form with odd values, or with odd bytes."""
    values: dict[str, object] = {key: rng.choice(_COUNTS) for key in rng.sample(_COUNTED, 3)}
    values["kind"] = rng.choice(("launch", "forward", "idle", "heartbeat"))
    values[rng.choice(("forward_s", "age_s", "end_s"))] = rng.choice(_SECONDS)
    if rng.random() < 0.3:
        values["tokens_per_rank"] = rng.choices(_COUNTS, k=rng.randrange(4))
    role = rng.choice(("prefill", "decode"))
    if rng.random() < 0.5:
        return Input("endforward", name, b"", {"fields": values, "role": role})
    true = EndForward(
        instance_id="", boot_id="b", role="prefill", dp_rank=0, dp_size=2, seq=1, kind="idle"
    )
    return Input(
        "endforward", name, mutated(encode_endforward(true)[2], rng, _PIECES["endforward"])
    )
