"""Tokenizing text that was partly tokenized before.

Owns the cut of a text at its special tokens, and the memory of what the pieces between them became.
Blocks: to be called in threads.

Why a piece's ids do not depend on its neighbours: a Hugging Face tokenizer first takes the added
tokens out of the raw text (leftmost, longest) and then normalises, splits and encodes each rest on
its own. A chat template puts such tokens around every message, so what a conversation has in common
with its last turn, or with others (system prompt, tools), is looked up. Tokenizers for which that
does not hold (added tokens that swallow spaces or want word boundaries, a pre-tokenizer that treats
the first piece of a text differently, post-processors of unknown kind) tokenize whole texts, and
only whole texts are remembered. SGLang's ``parallel_prompt_encode.py`` rests on the same property.

A long piece is cut at words or punctuation as well, where the tokenizer comes to the same ids with
the cut and without it: what it makes of a text while it works takes a hundred times the text.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sys
import threading
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tokenizers import Tokenizer

from sglang_sbs.router.prompts.special_tokens import SpecialTokenCutter

MAX_KEPT_BYTES = 64_000_000
"""Of the ids that are kept, and of what they are found by."""
_NAMED_CHARS = 1 << 10
"""The ids of a longer piece are found by its digest: the text itself is not kept."""
_ENTRY_BYTES = 300
"""What a piece takes besides its text and ids."""
_PART_CHARS = 1 << 15
"""A longer piece is cut. While it works, a tokenizer takes up to 140 bytes a character."""
_AT_ONCE_CHARS = 1 << 15
"""Given to the tokenizer in one call: of several long texts it would take every core."""
MOST_WHOLE_CHARS = _PART_CHARS
"""A longer piece without a place to cut it at (one endless word) is not tokenized."""
MOST_UNSPLIT_CHARS = 1 << 18
"""The same for tokenizers that split no text into words, so that none of theirs can be cut."""
_AROUND_CHARS = 100
"""On each side of a cut that is tried."""
_TRIES = 16
_CUTS = (re.compile(r"(?<=\w)[ \n](?=\w)"), re.compile(r"(?<=[^\W_])(?=[^\w\s])"))
"""Between two words; else before a punctuation mark, as in Chinese or JSON."""

_INDEPENDENT_SPLITTERS = frozenset({
    "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit",
    "BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts",
})  # fmt: skip
_KNOWN_POST_PROCESSORS = frozenset(
    {"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"}
)
_PROBE = "One\ttwo  three\n\n don't 12345 über 漢字 \U0001f600 e\u0301 "


class TooLong(ValueError):
    """It would take too much memory to tokenize this text."""


class TooManyTokens(ValueError):
    """A text has more tokens than anybody takes; ``args``: as far as they were counted."""


class TextPieces:
    """A tokenizer with a memory; may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """``tokenizer`` must neither truncate nor pad."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._known: OrderedDict[str | bytes, array[int]] = OrderedDict()
        """By :func:`_key` of their pieces."""
        self._bytes = 0
        self._lock = threading.Lock()
        self._cut: SpecialTokenCutter | None = None
        """``None``: only whole texts are remembered."""
        self._first, self._last = _surroundings(tokenizer)
        state = json.loads(tokenizer.to_str())
        self._cuts_words = state.get("pre_tokenizer") is not None
        self._most_whole = MOST_WHOLE_CHARS if self._cuts_words else MOST_UNSPLIT_CHARS
        self._specials = _cutting_tokens(state)
        if self._specials:
            longest_first = sorted(self._specials, key=len, reverse=True)
            self._cut = SpecialTokenCutter(longest_first)
            probe = _PROBE + _PROBE.join(longest_first[:3]) + _PROBE
            if list(self.encode(probe)) != _encode(tokenizer, [probe])[0]:
                self._cut = None
                self._known.clear()
                self._bytes = 0

    def encode(
        self, text: str, *, add_special_tokens: bool = False, most_tokens: float = math.inf
    ) -> array[int]:
        """Token ids as the tokenizer gives them for the whole text. Raises: TooLong, it cannot be
        tokenized; TooManyTokens, it has more than ``most_tokens``; nothing of it is kept."""
        cut = [text] if self._cut is None else self._cut.pieces(text)
        pieces = [part for piece in cut if piece for part in self._parts(piece)]
        found = self._look_up(pieces)
        missing = list(dict.fromkeys(p for p in pieces if p not in found))
        times = Counter(pieces)
        counted = sum(len(ids) * times[piece] for piece, ids in found.items())
        for some in _groups(missing):
            if counted > most_tokens:
                break
            for piece, ids in zip(some, _encode(self._tokenizer, some), strict=True):
                found[piece] = array("I", ids)
                counted += len(ids) * times[piece]
        if counted > most_tokens:
            raise TooManyTokens(counted)
        self._keep(missing, found)
        out = array("I", self._first if add_special_tokens else ())
        for piece in pieces:
            out += found[piece]
        if add_special_tokens:
            out += self._last
        return out

    def _parts(self, piece: str) -> Iterator[str]:
        """It in parts that can be tokenized one by one. Raises: TooLong."""
        start = 0
        while len(piece) - start > _PART_CHARS:
            end = self._cut_at_word(piece, start + _PART_CHARS // 2)
            if end is None:
                if len(piece) - start > self._most_whole:
                    raise TooLong(f"a text of {len(piece)} characters that cannot be cut")
                break
            yield piece[start:end]
            start = end
        yield piece[start:]

    def _cut_at_word(self, piece: str, start: int) -> int | None:
        """Where it can be cut, in half a part from ``start`` on."""
        if not self._cuts_words:
            return None
        for cuts in _CUTS:
            found = cuts.finditer(piece, start, start + _PART_CHARS // 2)
            for at in [cut.start() for cut in islice(found, _TRIES)]:
                left = piece[max(0, at - _AROUND_CHARS) : at]
                right = piece[at : at + _AROUND_CHARS]
                whole, *halves = _encode(self._tokenizer, [left + right, left, right])
                if whole == halves[0] + halves[1]:
                    return at
        return None

    def _look_up(self, pieces: Sequence[str]) -> dict[str, array[int]]:
        found: dict[str, array[int]] = {}
        with self._lock:
            for piece in pieces:
                if piece in self._specials:
                    found[piece] = array("I", (self._specials[piece],))
                elif (ids := self._known.get(key := _key(piece))) is not None:
                    self._known.move_to_end(key)
                    found[piece] = ids
        return found

    def _keep(self, pieces: Sequence[str], found: dict[str, array[int]]) -> None:
        with self._lock:
            for piece in pieces:
                key = _key(piece)
                if key not in self._known and len(piece) <= 2 * _PART_CHARS:
                    self._known[key] = found[piece]
                    self._bytes += _kept_bytes(key, found[piece])
            while self._bytes > self._max_bytes:
                self._bytes -= _kept_bytes(*self._known.popitem(last=False))


def _key(piece: str) -> str | bytes:
    if len(piece) <= _NAMED_CHARS:
        return piece
    return hashlib.blake2b(piece.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _kept_bytes(key: str | bytes, ids: array[int]) -> int:
    return sys.getsizeof(key) + len(ids) * ids.itemsize + _ENTRY_BYTES


def _groups(pieces: Sequence[str]) -> Iterator[list[str]]:
    """Some at a time, so that the tokenizer's objects are not all there at once."""
    start = chars = 0
    for at, piece in enumerate(pieces):
        if at > start and chars + len(piece) > _AT_ONCE_CHARS:
            yield list(pieces[start:at])
            start, chars = at, 0
        chars += len(piece)
    if pieces:
        yield list(pieces[start:])


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # Unlike ``encode`` this lets other threads run meanwhile, and skips offsets nobody wants.
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _surroundings(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    """The ids put before and after a text (beginning and end of sequence)."""
    encoding = tokenizer.encode("a")
    ids, added = array("I", encoding.ids), encoding.special_tokens_mask
    content = [index for index, special in enumerate(added) if not special]
    if not content:
        return ids, ids[:0]
    return ids[: content[0]], ids[content[-1] + 1 :]


def _cutting_tokens(state: dict[str, Any]) -> dict[str, int]:
    """Added tokens by which any text may be cut; empty: none may."""
    if not _is_one_of(_INDEPENDENT_SPLITTERS, state.get("pre_tokenizer"), "pretokenizers"):
        return {}
    if not _is_one_of(_KNOWN_POST_PROCESSORS, state.get("post_processor"), "processors"):
        return {}
    tokens = [token for token in state.get("added_tokens") or () if not token["normalized"]]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in tokens):
        return {}
    return {token["content"]: token["id"] for token in tokens if token["content"]}


def _is_one_of(known: frozenset[str], config: dict[str, Any] | None, parts: str) -> bool:
    """Also a sequence of them, under the name ``parts``; or none at all."""
    if config is not None and config.get("type") == "Sequence":
        return all(_is_one_of(known, part, parts) for part in config[parts])
    return config is None or config.get("type") in known
