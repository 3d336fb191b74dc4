"""Where one attempt at a request goes, in the words of the workers."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_sbs.router.workers.rank_contract import pick_bootstrap_room
from sglang_sbs.router.workers.worker import Worker
from sglang_sbs.wire.gangs import GangPart


@dataclass(frozen=True, slots=True)
class Placement:
    """Both workers, and the DP rank of each."""

    prefill: Worker
    prefill_rank: int
    decode: Worker
    decode_rank: int

    @property
    def prefill_origin(self) -> str:
        """Where the leg goes: the worker's URL, or that of its DP rank."""
        return self.prefill.url_of(self.prefill_rank)

    @property
    def decode_origin(self) -> str:
        return self.decode.url_of(self.decode_rank)

    def pick_room(self, gang: GangPart | None) -> int:
        """A bootstrap room by which engines know their ranks, and ``gang`` if there is one."""
        ranks = (self.prefill_rank, self.prefill.dp_size)
        if self.decode.known.rank_choice == "by_room":
            return pick_bootstrap_room(*ranks, self.decode_rank, self.decode.dp_size, gang=gang)
        return pick_bootstrap_room(*ranks, gang=gang)
