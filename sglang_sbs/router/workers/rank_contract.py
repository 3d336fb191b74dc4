"""How each SGLang release receives the DP ranks of a request, and which ranks can be chosen.

From 0.5.10 on each leg carries its own rank (``routed_dp_rank``), decode gets prefill's in
``disagg_prefill_dp_rank``, and the two are independent. Before, ranks are *coupled*: decode takes
the rank in its body (``data_parallel_rank``) for prefill's as well (``disaggregation/decode.py``:
``prefill_dp_rank=req.data_parallel_rank``) and would wait forever for KV from a rank without the
request. Without a rank in its body, decode expects the KV from rank ``room % prefill_dp_size``, and
its own controller (``managers/data_parallel_controller.py``) selects decode's rank:

| release | ``--load-balance-method`` of decode | decode's rank | |---|---|---| | 0.5.6 |
``round_robin`` (default), ``minimum_tokens`` | ``room % decode_dp_size`` | | 0.5.7 | the same;
``decode_round_robin`` takes turns | | | 0.5.8, 0.5.9 | ``follow_bootstrap_room`` | ``room %
decode_dp_size`` | | 0.5.8, 0.5.9 | ``auto`` (default), ``round_robin`` | in turn | | any |
``shortest_queue``, ``total_requests``, ``total_tokens`` | by the engine's counts |

So for these releases decode's body never contains a rank. Where the room decides, the router picks
one room that selects both ranks. It exists if both ranks have the same remainder modulo the
greatest common divisor of the DP sizes, and the scheduler chooses among such pairs. Where the
engine decides, the choice is left to it."""

from __future__ import annotations

import math
import random

from sglang_sbs.scheduling.events import RankChoice
from sglang_sbs.wire.gangs import GangPart, gang_room

UNCOUPLED_VERSION = (0, 5, 10)
"""First SGLang release with independent prefill and decode ranks."""
_NAMED_METHODS_VERSION = (0, 5, 8)
"""First release with a named method that follows the bootstrap room."""
_BY_ROOM_BEFORE = ("", "round_robin", "minimum_tokens")


def is_coupled(version: tuple[int, ...] | None) -> bool:
    """Return whether a release couples both ranks; builds without a version count as new."""
    return version is not None and (0, 0, 0) < version < UNCOUPLED_VERSION


def rank_choice_of(version: tuple[int, ...] | None, load_balance_method: str) -> RankChoice:
    if version is None or not is_coupled(version):
        return "free"
    if version < _NAMED_METHODS_VERSION:
        return "by_room" if load_balance_method in _BY_ROOM_BEFORE else "engine"
    return "by_room" if load_balance_method == "follow_bootstrap_room" else "engine"


def prefill_members(prefill_rank: int, *, coupled: bool, hint: bool = False) -> dict[str, int]:
    """Return the body members for prefill. ``hint``: prefill chooses its rank and registers it for
    decode, so no rank is sent."""
    if hint:
        return {}
    if coupled:
        return {"data_parallel_rank": prefill_rank}
    return {"disagg_prefill_dp_rank": prefill_rank, "routed_dp_rank": prefill_rank}


def decode_members(
    prefill_rank: int, decode_rank: int, *, coupled: bool, hint: bool = False
) -> dict[str, int]:
    """Return the body members for decode; ``hint`` as in :func:`prefill_members`."""
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
    """Pick a fresh room below 2**63 with ``room % prefill_dp_size == prefill_rank``.

    SGLang's ``follow_bootstrap_room`` sends the request to that rank; any other room makes it fail
    with a conflict (``disaggregation/common/conn.py``).

    Args:
        decode_rank: wanted value of ``room % decode_dp_size``, where that decides. If no room gives
            both ranks, prefill's counts, because a wrong one makes the request fail.
        gang: description of the request's batch to encode in the room."""
    step = math.lcm(prefill_dp_size, decode_dp_size)
    firsts = range(prefill_rank, step, prefill_dp_size)
    first = next((room for room in firsts if room % decode_dp_size == decode_rank), prefill_rank)
    if gang is not None:
        return gang_room(gang, step, first)
    return random.randrange(2**63 // step) * step + first
