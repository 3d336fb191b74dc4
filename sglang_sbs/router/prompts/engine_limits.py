"""Facts about all engines that decide how a prompt is read, and whether any engine accepts it."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

from sglang_sbs.console.plain_words import counted
from sglang_sbs.router.errors import TOO_LONG, RouterError
from sglang_sbs.router.prompts.block_names import BlockFormat

PromptKind = Literal["text", "chat"]


def too_long(found: str, most: str) -> RouterError:
    """Return the error for a prompt that no engine accepts.

    Clients recognize it by its words and continue with a shorter conversation. "longer than the
    model's context length" is SGLang's text (``TokenizerManager._validate_one_request``), which
    LiteLLM matches; "prompt is too long" is Anthropic's, which LangChain and Claude Code match."""
    why = f"prompt is too long: the input ({found}) is longer than the model's context length"
    return RouterError(400, TOO_LONG, f"{why} ({most})")


class LongestPrompt(NamedTuple):
    """The longest prompt that any engine accepts (``WorkerInfo.max_request_tokens``)."""

    tokens: float = math.inf
    """Limit in tokens; infinite if some engine's limit is unknown."""
    cuts: bool = False
    """True if an engine truncates longer prompts (``--allow-auto-truncate``) and accepts them."""
    context_tokens: float = math.inf
    """Longest context in tokens, generated ones included; infinite if some engine's is unknown."""

    def check(self, tokens: int, *, at_least: bool = False) -> None:
        """Raise RouterError (400) if every engine would refuse a prompt of this length."""
        if tokens > self.tokens and not self.cuts:
            found = f"{'at least ' if at_least else ''}{counted(tokens, 'token')}"
            raise too_long(found, f"{self.tokens:,} tokens")


class Known(NamedTuple):
    """Facts about the engines that are needed to read a prompt."""

    blocks: BlockFormat | None = None
    """Block format of most prefill instances, used to name blocks; ``None``: no names are
    needed."""
    longest: LongestPrompt = LongestPrompt()
    models: frozenset[str] = frozenset()
    """Full names of the served models, some of which may look like ``model:adapter``."""
    tokenizes: bool = True
    refused: frozenset[str] = frozenset()
    """Fields of a request that all engines of a role refuse."""
