"""What engines and routers say to each other, versioned and append-only, and the keys of sockets.
Knows nothing of who sends it."""

from sglang_sbs.wire.endforward import (
    TOPIC,
    EndForward,
    MalformedMessage,
    decode_endforward,
    encode_endforward,
)

__all__ = ["TOPIC", "EndForward", "MalformedMessage", "decode_endforward", "encode_endforward"]
