"""Setup for reading prompts: texts, and engines as a test wants them."""

from __future__ import annotations

from sglang_sbs.router.prompts import engine_limits
from sglang_sbs.router.prompts.block_names import BlockFormat
from sglang_sbs.router.prompts.engine_limits import LongestPrompt, PromptKind

USER = {"role": "user", "content": "What is the weather in Köln? " * 8}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TEXT = "the model and the batch of it <|im_start|> ü " * 8


class Known:
    """Engines as a test wants them."""

    def __init__(self) -> None:
        self.format: BlockFormat | None = BlockFormat(16)
        self.wrong: set[PromptKind] = set()
        self.ids = True
        self.models = {"org:model"}
        self.longest: LongestPrompt | None = None

    def known(self) -> engine_limits.Known:
        longest = self.longest or LongestPrompt()
        return engine_limits.Known(self.format, longest, frozenset(self.models))

    def agrees(self, kind: PromptKind) -> bool:
        return kind not in self.wrong

    def takes_ids(self, kind: PromptKind) -> bool:
        return self.ids
