"""Requests that become many. What engines answer to each of them counts as sent."""

from __future__ import annotations

import asyncio

import orjson

from benchmarks.hostile.case import Target, case
from benchmarks.raw_engine import COMPLETE

_BOTH = 2 * len(COMPLETE)
"""Bytes that prefill and decode answer to one request."""
_WIDE = {f"key{number}": number for number in range(5000)}


@case("batch-empty-texts", "16,385 empty texts and 5,000 other fields, 130 KB")
async def empty_texts(target: Target) -> None:
    await target.post(orjson.dumps({"text": [""] * 16_385} | _WIDE))


@case("batch-wide", "2,000 texts and 1 MB of other fields")
async def wide(target: Target) -> None:
    await target.post(orjson.dumps({"text": ["x"] * 2000, "extra": "x" * 1_000_000}))


@case("batch-full", "1,000 texts and 100 KB of other fields, which is allowed")
async def full(target: Target) -> None:
    await target.post(orjson.dumps({"text": ["x"] * 1000, "extra": "x" * 100_000}))
    target.sent_bytes += 1000 * _BOTH


@case("batch-full-immediate", "the same ten times, with an immediate policy", policy="round_robin")
async def full_immediate(target: Target) -> None:
    body = orjson.dumps({"text": ["x"] * 1000, "extra": "x" * 100_000})
    await asyncio.gather(*(target.post(body) for _ in range(10)))
    target.sent_bytes += target.statuses["200"] * 1000 * _BOTH


@case("batch-left", "1,000 texts, ten times, left after half a second")
async def left(target: Target) -> None:
    body = orjson.dumps({"text": ["x"] * 1000, "sampling_params": {"max_new_tokens": 512}})
    await asyncio.gather(*(target.post(body, leave_after_s=0.5) for _ in range(10)))
    target.sent_bytes += target.statuses["200"] * 1000 * _BOTH


@case("n-16384", '{"n": 16384}', policy="round_robin")
async def many_samples(target: Target) -> None:
    await target.post(orjson.dumps({"text": "x", "sampling_params": {"n": 16_384}}))


@case("batch-headers", "1,000 texts, and 100 headers of 30 KB that each of them would get")
async def headers(target: Target) -> None:
    line = b"x-request-id-%d: %b\r\n"
    headers = b"".join(line % (number, b"x" * 30_000) for number in range(100))
    await target.post(orjson.dumps({"text": ["x"] * 1000}), headers=headers)


@case("batch-headers-allowed", "1,000 texts, and 60 KB of headers that each of them gets")
async def headers_allowed(target: Target) -> None:
    headers = b"x-request-id-1: %b\r\nx-request-id-2: %b\r\n" % ((b"x" * 30_000,) * 2)
    await target.post(orjson.dumps({"text": ["x"] * 1000}), headers=headers)
    target.sent_bytes += 1000 * _BOTH


@case("batch-stream-options", "stream_options of 1 MB with 256 texts, of 30 MB with 1,000")
async def stream_options(target: Target) -> None:
    for size, texts in ((1_000_000, 256), (30_000_000, 1000)):
        options = {"include_usage": True, "more": "x" * size}
        body = {"text": ["x"] * texts, "stream": True, "stream_options": options}
        await target.post(orjson.dumps(body))
