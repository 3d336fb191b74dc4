"""Tokenizes text, reusing the ids of pieces tokenized before.

Splits a text at its special tokens and remembers the ids of the pieces in between. Calls block and
belong in threads.

A piece's ids do not depend on its neighbours: a Hugging Face tokenizer first extracts the added
tokens from the raw text (leftmost, longest) and then normalises, splits and encodes each rest
separately. A chat template puts such tokens around every message, so text shared with earlier turns
or with other chats (system prompt, tools) is looked up. For some tokenizers this does not hold
(added tokens that swallow spaces or need word boundaries, a pre-tokenizer that treats the first
piece differently, unknown post-processors). They tokenize whole texts, and only whole texts are
remembered. SGLang's ``parallel_prompt_encode.py`` relies on the same property.

A long piece is also split between words or before punctuation, where splitting does not change the
ids, because a tokenizer's working memory is a hundred times the text."""

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
"""Limit on the memory of cached ids and their keys."""
_NAMED_CHARS = 1 << 10
"""Longest piece cached under its text; longer ones are cached under a digest, to save memory."""
_ENTRY_BYTES = 300
"""Memory per cached piece in addition to key and ids (estimated)."""
_PART_CHARS = 1 << 15
"""Longest piece that is tokenized without a split, because a tokenizer needs up to 140 bytes per
character while it works."""
_AT_ONCE_CHARS = 1 << 15
"""Characters given to the tokenizer per call; with several long texts it would use every core."""
MOST_WHOLE_CHARS = _PART_CHARS
"""Longest piece tokenized if it cannot be split (one endless word)."""
MOST_UNSPLIT_CHARS = 1 << 18
"""Longest piece tokenized if the tokenizer never splits text into words (no piece can be split)."""
_AROUND_CHARS = 100
"""Characters tokenized on each side of a candidate split, to test that the ids stay the same."""
_TRIES = 16
_CUTS = (re.compile(r"(?<=\w)[ \n](?=\w)"), re.compile(r"(?<=[^\W_])(?=[^\w\s])"))
"""Candidate splits: between two words, else before a punctuation mark, as in Chinese or JSON."""

_INDEPENDENT_SPLITTERS = frozenset({
    "ByteLevel", "Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit",
    "BertPreTokenizer", "CharDelimiterSplit", "UnicodeScripts",
})  # fmt: skip
_KNOWN_POST_PROCESSORS = frozenset(
    {"ByteLevel", "TemplateProcessing", "BertProcessing", "RobertaProcessing"}
)
_PROBE = "One\ttwo  three\n\n don't 12345 über 漢字 \U0001f600 e\u0301 "


class TooLong(ValueError):
    """Tokenizing this text would take too much memory."""


class TooManyTokens(ValueError):
    """A text has more tokens than any engine accepts; ``args``: the number counted so far."""


class TextPieces:
    """A tokenizer with a cache, usable from several threads."""

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_KEPT_BYTES) -> None:
        """Create the cache; ``tokenizer`` must neither truncate nor pad."""
        self._tokenizer = tokenizer
        self._max_bytes = max_bytes
        self._known: OrderedDict[str | bytes, array[int]] = OrderedDict()
        """Cached token ids of pieces, by :func:`_key`."""
        self._bytes = 0
        self._lock = threading.Lock()
        self._cut: SpecialTokenCutter | None = None
        """Splits a text at special tokens; ``None`` if only whole texts can be cached."""
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
        """Return the ids that the tokenizer gives for the whole text. Raises: TooLong, it cannot be
        tokenized; TooManyTokens, it has more than ``most_tokens`` (nothing is cached then)."""
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
        """Split a piece into parts that can be tokenized separately. Raises: TooLong, a part
        without a possible split is too long."""
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
        """Return a position where a split does not change the ids, within half of ``_PART_CHARS``
        after ``start``; ``None`` if none is found."""
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
    """Yield pieces in groups of about ``_AT_ONCE_CHARS`` characters, one per call of the tokenizer:
    the memory of a call grows with its text."""
    start = chars = 0
    for at, piece in enumerate(pieces):
        if at > start and chars + len(piece) > _AT_ONCE_CHARS:
            yield list(pieces[start:at])
            start, chars = at, 0
        chars += len(piece)
    if pieces:
        yield list(pieces[start:])


def _encode(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    # Unlike ``encode`` this releases the GIL, and computes no offsets.
    encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def _surroundings(tokenizer: Tokenizer) -> tuple[array[int], array[int]]:
    """Return the ids put before and after a text (of the beginning and end of sequence)."""
    encoding = tokenizer.encode("a")
    ids, added = array("I", encoding.ids), encoding.special_tokens_mask
    content = [index for index, special in enumerate(added) if not special]
    if not content:
        return ids, ids[:0]
    return ids[: content[0]], ids[content[-1] + 1 :]


def _cutting_tokens(state: dict[str, Any]) -> dict[str, int]:
    """Return the ids of the added tokens at which any text can be split; empty if the tokenizer is
    not known to allow it. ``state``: the content of ``tokenizer.json``."""
    if not _is_one_of(_INDEPENDENT_SPLITTERS, state.get("pre_tokenizer"), "pretokenizers"):
        return {}
    if not _is_one_of(_KNOWN_POST_PROCESSORS, state.get("post_processor"), "processors"):
        return {}
    tokens = [token for token in state.get("added_tokens") or () if not token["normalized"]]
    if any(token["lstrip"] or token["rstrip"] or token["single_word"] for token in tokens):
        return {}
    return {token["content"]: token["id"] for token in tokens if token["content"]}


def _is_one_of(known: frozenset[str], config: dict[str, Any] | None, parts: str) -> bool:
    """Return whether the type of a tokenizer's component is ``known``. A sequence must have only
    known components, listed under the key ``parts``; a missing component counts as known."""
    if config is not None and config.get("type") == "Sequence":
        return all(_is_one_of(known, part, parts) for part in config[parts])
    return config is None or config.get("type") in known
