"""Message types on every socket, versioned and append-only. Knows nothing of who sends them."""

from sglang_sbs.wire.endforward import (
    TOPIC,
    EndForward,
    MalformedMessage,
    decode_endforward,
    encode_endforward,
)

__all__ = [
    "TOPIC",
    "EndForward",
    "MalformedMessage",
    "decode_endforward",
    "encode_endforward",
]
