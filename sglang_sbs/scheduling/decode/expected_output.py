"""How long answers are expected to be, learned from those that ended."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_sbs.scheduling.decode.instance import DecodeInstance
from sglang_sbs.scheduling.events import RequestEnded
from sglang_sbs.scheduling.request import Request

_STEP = 0.05


class ExpectedOutput:
    """In tokens; the smoothed mean of all answers."""

    def __init__(self, default_tokens: int) -> None:
        self._tokens = float(default_tokens)

    def total_tokens(self, request: Request) -> int:
        """Prompt plus expected output."""
        expected = int(self._tokens)
        if request.max_new_tokens is not None:
            expected = min(expected, request.max_new_tokens)
        return request.prompt_tokens + expected

    def answered_tokens(
        self, event: RequestEnded, request: Request, instances: Sequence[DecodeInstance]
    ) -> int:
        """No answer is longer than was asked for, or than a decode rank holds."""
        most = max((one.kv_capacity_tokens for one in instances), default=0)
        if request.max_new_tokens is not None:
            most = min(most, request.max_new_tokens)
        return min(max(0, event.completion_tokens or 0), most)

    def learn(self, tokens: int) -> None:
        self._tokens += _STEP * (tokens - self._tokens)
