"""Request ids: taken from the client's headers or made up, as sglang_router does.

Owns their form. Must not know what they are used for (``rid`` of the engines is another thing).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

_PREFIXES = {
    "/v1/chat/completions": "chatcmpl-",
    "/v1/completions": "cmpl-",
    "/generate": "gnt-",
}


def request_id(path: str, headers: Mapping[str, str], names: Sequence[str]) -> str:
    """The first of the headers ``names`` the client sent, else a prefix and 24 alphanumerics.

    Args:
        headers: any case will do for names in lower case.
    """
    for name in names:
        value = headers.get(name)
        if value:
            return value
    return f"{_PREFIXES.get(path, 'req-')}{random.getrandbits(96):024x}"
