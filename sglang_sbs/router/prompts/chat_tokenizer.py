"""A model's tokenizer and chat template without transformers. Reads ``tokenizer.json``,
``tokenizer_config.json`` and ``chat_template.jinja`` as transformers and SGLang do. Tokenizing
blocks the calling thread."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from sglang_sbs.router.prompts.chat_template import ChatTemplate
from sglang_sbs.router.prompts.known_text import TextPieces
from sglang_sbs.router.prompts.written_size import TemplateError

_NAMED_TOKENS = tuple(f"{n}_token" for n in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_BOS_BY_CONFIG = frozenset({
    "LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast",
    "GemmaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast",
})  # fmt: skip
"""Tokenizer classes for which SGLang applies ``add_bos_token`` (default: true) instead of
``tokenizer.json`` (``_fix_v5_add_bos_eos_token``)."""


@dataclass(frozen=True, slots=True)
class PromptIds:
    ids: array[int]
    """Token ids as uint32."""
    exact: bool = True
    """True if the ids are the whole prompt, because it contains only text."""
    certain: bool = True
    """True if an engine with the same model files is sure to produce the same ids."""


class ChatTokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        special_tokens: Mapping[str, str],
        max_length: int | None = None,
    ) -> None:
        """Create a tokenizer; ``max_length``: the model's limit in tokens, from its files. Raises:
        jinja2.TemplateError, ``template`` is invalid."""
        self.max_length = max_length
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.template = ChatTemplate(template, special_tokens) if template else None
        self.pieces = TextPieces(tokenizer)
        bos = special_tokens.get("bos_token")
        self._bos_id = tokenizer.token_to_id(bos) if bos else None

    @classmethod
    def load(cls, directory: Path, chat_template: Path | None = None) -> ChatTokenizer:
        """Load from a model directory; ``chat_template`` overrides the model's own. Raises:
        ValueError, naming the missing or broken file."""
        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise ValueError(
                f"--tokenizer-path: no tokenizer.json at {path}; give the directory of a Hugging "
                "Face model with a fast tokenizer"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"--tokenizer-path: {path}: {error}") from error
        config = _read_json(path.with_name("tokenizer_config.json"))
        named = {name: _token_text(config.get(name)) for name in _NAMED_TOKENS}
        special = {name: token for name, token in named.items() if token is not None}
        _add_configured_tokens(tokenizer, config)
        _add_bos(tokenizer, config, special.get("bos_token"))
        own_file = path.with_name("chat_template.jinja")
        template: str | None
        if chat_template is not None:
            try:
                written = chat_template.read_text("utf-8")
            except OSError as error:
                raise ValueError(f"--chat-template: {error}") from error
            template = written.strip("\n").replace("\\n", "\n")  # as SGLang's own flag does
        elif own_file.is_file():
            template = own_file.read_text("utf-8")
        else:
            template = _first_template(config.get("chat_template"))
        # transformers writes a huge number for models without a limit.
        longest = config.get("model_max_length")
        known = isinstance(longest, int) and 0 <= longest < 1 << 63
        try:
            return cls(tokenizer, template, special, longest if known else None)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template of {path.parent}: {error}") from error

    def text_ids(self, text: str, most_tokens: float = math.inf) -> array[int]:
        """Tokenize a text prompt as ``/generate`` does, with the beginning-of-sequence token.
        Raises: TooLong, it would take too much memory; TooManyTokens, more than ``most_tokens``."""
        return self.pieces.encode(text, add_special_tokens=True, most_tokens=most_tokens)

    def chat_ids(self, body: Mapping[str, Any], most_tokens: float = math.inf) -> PromptIds:
        """Tokenize a ``/v1/chat/completions`` body. Raises: TemplateError, it cannot be rendered;
        TooLong, it would take too much memory; TooManyTokens, it contains only text and has more
        than ``most_tokens``."""
        if self.template is None:
            raise TemplateError("the tokenizer has none; give one with --chat-template")
        chat = self.template.render(body)
        ids = self.pieces.encode(chat.text, most_tokens=most_tokens if chat.only_text else math.inf)
        if chat.continuation:
            more = self.pieces.encode(chat.continuation, add_special_tokens=True)
            if more and more[0] == self._bos_id:
                more = more[1:]
            ids += more
        return PromptIds(ids, exact=chat.only_text, certain=chat.certain)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise ValueError(f"--tokenizer-path: {path}: {error}") from error
    return value if isinstance(value, dict) else {}


def _token_text(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _add_configured_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens of ``added_tokens_decoder`` in ``config`` that the tokenizer lacks."""
    listed = config.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, value in sorted(
        (int(id_), token) for id_, token in listed.items() if str(id_).isdigit()
    ):
        content = _token_text(value)
        if content is None or content in known:
            continue
        flags = {name: bool(value.get(name)) for name in ("single_word", "lstrip", "rstrip")}
        special = bool(value.get("special"))
        normalized = bool(value.get("normalized", not special))
        token = AddedToken(content, normalized=normalized, special=special, **flags)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([token])


def _add_bos(tokenizer: Tokenizer, config: Mapping[str, Any], bos: str | None) -> None:
    if config.get("tokenizer_class") not in _BOS_BY_CONFIG or bos is None:
        return
    bos_id = tokenizer.token_to_id(bos)
    wanted = config.get("add_bos_token")
    if wanted is False or bos_id is None or bos_id in tokenizer.encode("").ids:
        return
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def _first_template(value: Any) -> str | None:
    """Return the config's ``chat_template``: a string, or the first of named ones as in SGLang."""
    named = value if isinstance(value, list) else [{"template": value}]
    templates = (item.get("template") for item in named if isinstance(item, dict))
    return next((template for template in templates if isinstance(template, str)), None)
