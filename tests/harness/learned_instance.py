"""A prefill instance whose forward times are known, and requests for it."""

from __future__ import annotations

import random

from sglang_sbs.scheduling import InstanceUp
from sglang_sbs.scheduling.prefill.instance import PrefillInstance
from sglang_sbs.scheduling.request import Request

CHUNK = 1000
FIXED_S, TOKEN_S, PAIR_S = 0.1, 1e-4, 1e-7


def instance(name: str = "p0", dp_size: int = 2) -> PrefillInstance:
    """Has learned T = 0.1 s + max over ranks of (0.1 ms per token + 0.1 us per pair)."""
    up = InstanceUp(instance=name, role="prefill", dp_size=dp_size, chunk_tokens=CHUNK)
    it = PrefillInstance(up, t_default_s=0.2, default_chunk_tokens=CHUNK)
    rng = random.Random(1)
    for _ in range(400):
        tokens = [rng.randrange(1, CHUNK) for _ in range(dp_size)]
        pairs = [rng.choice([0.0, 1e6, 5e6]) * rng.random() for _ in range(dp_size)]
        slowest_s = max(TOKEN_S * n + PAIR_S * p for n, p in zip(tokens, pairs, strict=True))
        it.model.observe(tokens, FIXED_S + slowest_s, pairs)
    return it


def request(rid: str, tokens: int) -> Request:
    return Request(rid, 0, tokens, None, 0.0, 60.0)
