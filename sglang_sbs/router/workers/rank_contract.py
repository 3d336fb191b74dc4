"""How an SGLang release is told the DP ranks of a request, and which of them can be chosen.

From 0.5.10 on each leg names its own rank (``routed_dp_rank``), decode is told prefill's in
``disagg_prefill_dp_rank``, and the two are independent. Before, ranks are *coupled*: a rank in
decode's body (``data_parallel_rank``) is taken for prefill's as well (``disaggregation/decode.py``:
``prefill_dp_rank=req.data_parallel_rank``), so that decode would wait for ever for KV from a rank
that does not have the request. Without one, decode expects the KV from rank
``room % prefill_dp_size``, and its own controller (``managers/data_parallel_controller.py``) picks
decode's rank:

| release | ``--load-balance-method`` of decode | decode's rank |
|---|---|---|
| 0.5.6 | ``round_robin`` (default), ``minimum_tokens`` | ``room % decode_dp_size`` |
| 0.5.7 | the same; ``decode_round_robin`` takes turns | |
| 0.5.8, 0.5.9 | ``follow_bootstrap_room`` | ``room % decode_dp_size`` |
| 0.5.8, 0.5.9 | ``auto`` (default), ``round_robin`` | in turn |
| any | ``shortest_queue``, ``total_requests``, ``total_tokens`` | as the engine counts |

So decode's body never names a rank there. Where the room decides, one room is picked for both
ranks, which exists if they leave the same remainder by the greatest common divisor of both DP
sizes; the scheduler is told so and chooses among those. Where the engine decides, it is left to it.
"""

from __future__ import annotations

import math
import random

from sglang_sbs.scheduling.events import RankChoice
from sglang_sbs.wire.gangs import GangPart, gang_room

UNCOUPLED_VERSION = (0, 5, 10)
"""First SGLang release whose prefill and decode ranks can be chosen independently."""
_NAMED_METHODS_VERSION = (0, 5, 8)
"""First release in which following the bootstrap room is a method with a name."""
_BY_ROOM_BEFORE = ("", "round_robin", "minimum_tokens")


def is_coupled(version: tuple[int, ...] | None) -> bool:
    """Whether a release couples both ranks; builds without a number are taken for new ones."""
    return version is not None and (0, 0, 0) < version < UNCOUPLED_VERSION


def rank_choice_of(version: tuple[int, ...] | None, load_balance_method: str) -> RankChoice:
    if version is None or not is_coupled(version):
        return "free"
    if version < _NAMED_METHODS_VERSION:
        return "by_room" if load_balance_method in _BY_ROOM_BEFORE else "engine"
    return "by_room" if load_balance_method == "follow_bootstrap_room" else "engine"


def prefill_members(prefill_rank: int, *, coupled: bool, hint: bool = False) -> dict[str, int]:
    """``hint``: prefill chooses the rank itself and registers it for decode, unless it is named."""
    if hint:
        return {}
    if coupled:
        return {"data_parallel_rank": prefill_rank}
    return {"disagg_prefill_dp_rank": prefill_rank, "routed_dp_rank": prefill_rank}


def decode_members(
    prefill_rank: int, decode_rank: int, *, coupled: bool, hint: bool = False
) -> dict[str, int]:
    """``hint``: as in :func:`prefill_members`."""
    if coupled:
        return {}
    if hint:
        return {"routed_dp_rank": decode_rank}
    return {"disagg_prefill_dp_rank": prefill_rank, "routed_dp_rank": decode_rank}


def pick_bootstrap_room(
    prefill_rank: int,
    prefill_dp_size: int,
    decode_rank: int = 0,
    decode_dp_size: int = 1,
    gang: GangPart | None = None,
) -> int:
    """A fresh room below 2**63 with ``room % prefill_dp_size == prefill_rank``.

    That is where SGLang's ``follow_bootstrap_room`` puts the request anyway; any other room makes
    it fail with a conflict (``disaggregation/common/conn.py``).

    Args:
        decode_rank: wanted as ``room % decode_dp_size``, where that decides on it. If no room gives
            both, prefill's rank counts: with a wrong one the request would fail.
        gang: what the room is to say of the requests it is sent with.
    """
    step = math.lcm(prefill_dp_size, decode_dp_size)
    firsts = range(prefill_rank, step, prefill_dp_size)
    first = next((room for room in firsts if room % decode_dp_size == decode_rank), prefill_rank)
    if gang is not None:
        return gang_room(gang, step, first)
    return random.randrange(2**63 // step) * step + first
