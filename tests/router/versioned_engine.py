"""A mock engine that takes DP ranks as a given SGLang release does, and holds callers to it.

Owns the rank rules of releases as their sources have them: ``managers/data_parallel_controller.py``
(who runs a request), ``disaggregation/decode.py`` and ``common/conn.py`` (from whom decode expects
the KV cache). Written from those, not from the router's own table. Must not know the router.

A pair that the real engines could not serve is answered with an error that says why: decode would
wait for KV from a rank that never had the request, or an index would kill the controller.
"""

from __future__ import annotations

from typing import Any

from tools.stand_ins.mock_engine import MockEngine
from tools.stand_ins.mock_script import Behaviour, EngineRole, RecordedRequest, Rooms

Version = tuple[int, int, int]


class RankedRooms(Rooms):
    """Also knows which prefill rank has the request of a room."""

    def __init__(self, prefill_dp_size: int) -> None:
        super().__init__()
        self.prefill_dp_size = prefill_dp_size
        self.prefill_rank: dict[int, int] = {}


class VersionedEngine(MockEngine):
    """``ranks``: where each request ran, in order of arrival; ``faults``: what went wrong."""

    def __init__(
        self,
        role: EngineRole,
        version: str,
        rooms: RankedRooms,
        *,
        dp_size: int = 2,
        load_balance_method: str | None = None,
    ) -> None:
        """``load_balance_method``: as launched; ``None`` is the release's default."""
        self.version: Version = tuple(int(n) for n in version.split(".")[:3])  # type: ignore[assignment]
        self.method = self._resolve(role, load_balance_method)
        info: dict[str, Any] = {"version": version, "load_balance_method": self.method}
        if self.version < (0, 5, 22):
            info |= {"attn_dp_size": None, "dp_size": dp_size}
        super().__init__(role, dp_size=dp_size, rooms=rooms, server_info=info)
        self.has_ready = self.version >= (0, 5, 20)
        self.ranks: list[int] = []
        self.rank_of: dict[str, int] = {}
        self.faults: list[str] = []
        self._ranked = rooms
        self._turn = 0

    def _resolve(self, role: EngineRole, method: str | None) -> str:
        """``server_args.py``: ``_handle_load_balance_method`` (0.5.8+)."""
        if self.version < (0, 5, 8):
            return method or "round_robin"
        if method in (None, "auto"):
            return "follow_bootstrap_room" if role == "prefill" else "round_robin"
        return str(method)

    async def _until_answer(self, record: RecordedRequest, behaviour: Behaviour) -> None:
        fault = self._take(record)
        if fault:
            self.faults.append(fault)
        await super()._until_answer(record, behaviour)

    async def _answer(
        self, request: Any, record: RecordedRequest, behaviour: Behaviour, begun: Any
    ) -> Any:
        if record.rid not in self.rank_of:
            why = self.faults[-1] if self.faults else "no rank"
            behaviour = Behaviour(status=500, message=why)
        return await super()._answer(request, record, behaviour, begun)

    def _take(self, record: RecordedRequest) -> str:
        """Give a request to a rank; what a real engine of this release would stumble over."""
        body, room = record.body, int(record.body["bootstrap_room"])
        coupled = self.version < (0, 5, 10)
        # Fields that a release does not know are dropped when the body is parsed.
        named = body.get("data_parallel_rank")
        if not coupled:
            named = body.get("routed_dp_rank", named)
        if named is not None and not 0 <= named < self.dp_size:
            return f"IndexError: rank {named} of {self.dp_size} ends the controller"
        rank = self._dispatch(room) if named is None else int(named)
        if self.role == "prefill":
            if not coupled and self.method == "follow_bootstrap_room":
                conflict = self.version >= (0, 5, 11) and room % self.dp_size != rank
                if conflict:
                    return f"follow_bootstrap_room conflict: room {room}, rank {rank}"
            self._ranked.prefill_rank[room] = rank
        else:
            source = named if coupled else body.get("disagg_prefill_dp_rank")
            if source is None:
                source = room % self._ranked.prefill_dp_size
            # Prefill's leg is written first, but the two arrive as they like.
            held = self._ranked.prefill_rank.get(room, room % self._ranked.prefill_dp_size)
            if source != held:
                return f"waits for KV from prefill rank {source}; rank {held} has the request"
        self.ranks.append(rank)
        self.rank_of[record.rid] = rank
        return ""

    def _dispatch(self, room: int) -> int:
        """The controller's choice for a request that names no rank."""
        by_room = self.method == "follow_bootstrap_room" or (
            self.version < (0, 5, 8) and self.method in ("round_robin", "minimum_tokens")
        )
        if by_room:
            return room % self.dp_size
        self._turn += 1
        return (self._turn - 1) % self.dp_size
