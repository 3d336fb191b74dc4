"""Requests as the scheduler keeps them, for tests that need little of one."""

from __future__ import annotations

from sglang_sbs.scheduling.request import Request


def request(rid: str, tokens: int, *, order: int = 0, output: int = 0) -> Request:
    return Request(
        rid=rid,
        order=order,
        prompt_tokens=tokens,
        max_new_tokens=None,
        arrived_s=0.0,
        deadline_s=100.0,
        total_tokens=tokens + output,
    )
