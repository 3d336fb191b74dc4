"""How each SGLang release receives the DP ranks of a request, and which ranks can be chosen.

From 0.5.10 on each leg carries its own rank (``routed_dp_rank``), decode gets prefill's in
``disagg_prefill_dp_rank``, and the two are independent. Before, ranks are *coupled*: decode takes
the rank in its body (``data_parallel_rank``) for prefill's as well (``disaggregation/decode.py``:
``prefill_dp_rank=req.data_parallel_rank``) and would wait forever for KV from a rank without the
request. Without a rank in its body, decode expects the KV from rank ``room % prefill_dp_size``, and
its own controller (``managers/data_parallel_controller.py``) selects decode's rank. So for these
releases decode's body never contains a rank, and the scheduler chooses only the decode instance."""

from __future__ import annotations

import random

from sglang_sbs.wire.gangs import GangPart, gang_room

UNCOUPLED_VERSION = (0, 5, 10)
"""First SGLang release with independent prefill and decode ranks."""


def is_coupled(version: tuple[int, ...] | None) -> bool:
    """Return whether a release couples both ranks; builds without a version count as new."""
    return version is not None and (0, 0, 0) < version < UNCOUPLED_VERSION


def prefill_members(prefill_rank: int, *, coupled: bool, hint: bool = False) -> dict[str, int]:
    """Return the members of prefill's body that set DP ranks (``coupled``: :func:`is_coupled`).
    ``hint``: prefill chooses its rank and registers it for decode, so no rank is sent."""
    if hint:
        return {}
    if coupled:
        return {"data_parallel_rank": prefill_rank}
    return {"disagg_prefill_dp_rank": prefill_rank, "routed_dp_rank": prefill_rank}


def decode_members(
    prefill_rank: int, decode_rank: int, *, coupled: bool, hint: bool = False
) -> dict[str, int]:
    """Return the members of decode's body that set DP ranks, as :func:`prefill_members` does."""
    if coupled:
        return {}
    if hint:
        return {"routed_dp_rank": decode_rank}
    return {"disagg_prefill_dp_rank": prefill_rank, "routed_dp_rank": decode_rank}


def pick_bootstrap_room(
    prefill_rank: int, prefill_dp_size: int, gang: GangPart | None = None
) -> int:
    """Pick a fresh room below 2**63 with ``room % prefill_dp_size == prefill_rank``.

    SGLang's ``follow_bootstrap_room`` sends the request to that rank; any other room makes it fail
    with a conflict (``disaggregation/common/conn.py``). ``gang``: description of the request's
    batch to encode in the room."""
    if gang is not None:
        return gang_room(gang, prefill_dp_size, prefill_rank)
    drawn = random.getrandbits(62)
    return drawn - drawn % prefill_dp_size + prefill_rank
