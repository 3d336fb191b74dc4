"""The bodies of a request's two legs: its own members and the routing fields of one attempt."""

from __future__ import annotations

from typing import Any

import orjson

from sglang_sbs.router.requests.plan import ASK_CACHED, Plan, RouteKind, Unit
from sglang_sbs.router.workers.placement import Placement
from sglang_sbs.router.workers.rank_contract import decode_members, prefill_members

_IDS_FIELD: dict[RouteKind, str] = {
    "generate": "input_ids",
    "completions": "prompt",
    "chat": "input_ids",
}
_JOINED_BYTES = 1 << 16
"""Smaller bodies are one piece: that is quicker to send."""

Pieces = tuple[bytes | bytearray, ...]


def leg_bodies(
    unit: Unit,
    plan: Plan,
    placement: Placement,
    *,
    rid: str,
    room: int,
    ids_json: bytes | None = None,
    asks_cached: bool = False,
) -> tuple[Pieces, Pieces]:
    """The bodies for prefill and decode. What is large in them is there once, however many legs.

    Prefill is asked without streaming: its one reply says how the leg went by its HTTP status, and
    its counts come in one piece. ``room``: the bootstrap room. ``ids_json``: token ids that both
    legs get instead of the text, or for a chat instead of what they would make of its messages.
    ``asks_cached``: prefill is to say how much it had cached, even if it was not started to do so.
    """
    prefiller, decoder, rank = placement.prefill, placement.decode, placement.prefill_rank
    shared = {
        "rid": rid,
        "bootstrap_host": prefiller.bootstrap_host,
        "bootstrap_port": prefiller.bootstrap_port,
        "bootstrap_room": room,
    }
    prefill = shared | prefill_members(rank, coupled=prefiller.known.coupled) | {"stream": False}
    if asks_cached:
        prefill[ASK_CACHED] = True
    decode_ranks = decode_members(rank, placement.decode_rank, coupled=decoder.known.coupled)
    decode = shared | decode_ranks | {"stream": plan.stream}
    prompt = plan.prompts[unit.prompt_index]
    member = prompt.member
    if ids_json is not None:
        member = b'"%b":%b' % (_IDS_FIELD[plan.kind].encode(), ids_json)
    members = [one for one in (member, prompt.own, plan.common) if one]
    options = plan.stream_options if plan.stream else None
    more = b"" if options is None else b',"stream_options":%b' % options
    return _pieces(members, prefill, b""), _pieces(members, decode, more)


def _pieces(members: list[bytes | bytearray], fields: dict[str, Any], more: bytes) -> Pieces:
    end = b"%b%b}" % (orjson.dumps(fields)[1:-1], more)
    if sum(map(len, members)) <= _JOINED_BYTES:
        return (b"{%b}" % b",".join((*members, end[:-1])),)
    pieces: list[bytes | bytearray] = [b"{"]
    for one in members:
        pieces += (one, b",")
    return (*pieces, end)
