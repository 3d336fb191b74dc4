"""Batches of KV events, read at once."""

from __future__ import annotations

from sglang_sbs.router.signals.kv_messages import KvBatch, decode_in_parts


def decode_kv_batch(payload: bytes) -> KvBatch:
    """Raises: MalformedMessage."""
    parts = decode_in_parts(payload)
    while True:
        try:
            next(parts)
        except StopIteration as over:
            batch: KvBatch = over.value
            return batch
