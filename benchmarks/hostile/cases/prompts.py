"""Prompts that are hard to render or to cut."""

from __future__ import annotations

from benchmarks.hostile.case import Target, case

_PART = b"<|reserved_special_token_"


@case("special-tokens", "2 MB of the beginning of 255 special tokens", tokenizer=True)
async def special_tokens(target: Target) -> None:
    await target.post(b'{"text":"%b"}' % (_PART * (2_000_000 // len(_PART))))
