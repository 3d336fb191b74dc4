"""Messages between engines and routers, versioned and append-only, and the keys of their sockets.
Independent of the sender."""

from sglang_sbs.wire.endforward import (
    TOPIC,
    EndForward,
    MalformedMessage,
    decode_endforward,
    encode_endforward,
)

__all__ = ["TOPIC", "EndForward", "MalformedMessage", "decode_endforward", "encode_endforward"]
