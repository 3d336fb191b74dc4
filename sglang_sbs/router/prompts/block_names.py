"""What SGLang's KV events call the full pages of a prompt.

Token ids in, the signed 64-bit names out that an engine publishes for the same tokens
(``BlockStored.block_hashes``).

A page's digest is SHA-256 over the digest of the page before it and its token ids as little-endian
uint32; its name is the first 8 bytes, big-endian (``get_native_hash`` and ``hash_str_to_int64`` in
SGLang's ``mem_cache/utils.py``). So a name stands for a page *and* everything before it, and a
prompt with a known beginning has known names: chains are kept in pieces of about a thousand tokens
and only what is new is hashed.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from sglang_sbs.router.limits import MAX_BLOCKS
from sglang_sbs.router.requests.body_fields import PLAIN, Namespace

MAX_NAMES = MAX_BLOCKS
"""Of one prompt; pages after these are not looked for."""
COARSE_TOKENS = 64
"""Where no engine publishes KV events, a block is the fewest pages with so many tokens: the index
needs some 300 bytes a block, and a prompt in pages of one token has as many as tokens."""
TEXT_BYTES_PER_TOKEN = 4
"""Text without a tokenizer: so many bytes stand for a token of its blocks."""

_PIECE_BYTES = 4096
_MAX_PIECES = 4096
"""Kept: 4 million tokens, in 2 MiB with pages of 64 tokens and 35 MiB with pages of one."""
_known: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
_SCOPE_TAG = b"sglang-sbs-namespace-v1"
_TEXT_SEED = hashlib.sha256(b"sglang-sbs-text-v1").digest()


class BlockFormat(NamedTuple):
    page_tokens: int
    bigram: bool = False
    """EAGLE keys its cache by pairs of neighbouring tokens: one fewer than there are tokens."""


class BlockNamer:
    """May be used from several threads."""

    def __init__(self, *, as_published: bool = True) -> None:
        """``as_published``: a namespace counts as it does in KV events, which leave ``extra_key``
        out. Without, it keeps names apart that no event would: for engines that publish none."""
        self._as_published = as_published

    def names(
        self, ids: list[int] | array[int], blocks: BlockFormat, namespace: Namespace = PLAIN
    ) -> array[int]:
        """Names of the full pages, the first ``MAX_NAMES`` of them. Raises: ValueError, something
        is no token id."""
        try:
            tokens = array("I", ids)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"not a list of token ids: {error}") from error
        width = 4
        if blocks.bigram:
            if len(tokens) < 2:
                return array("q")
            pairs = array("I", bytes(8 * (len(tokens) - 1)))
            pairs[0::2], pairs[1::2] = tokens[:-1], tokens[1:]
            tokens, width = pairs, 8
        if sys.byteorder == "big":
            tokens.byteswap()
        seed = b""
        if namespace.cache_salt:
            seed = _sha256(b"sglang-cache-salt-v1\0" + namespace.cache_salt.encode())
        names = _chain(memoryview(tokens).cast("B"), blocks.page_tokens * width, seed)
        scope = self._scope(namespace)
        return names if scope is None else _scoped(names, scope)

    def text_names(
        self, text: str | bytes, page_tokens: int, namespace: Namespace = PLAIN
    ) -> array[int]:
        """Names for text nobody tokenized, which no engine publishes. Pages are taken to have
        ``TEXT_BYTES_PER_TOKEN`` bytes per token. Good for recognising what was sent before, not for
        what an engine says."""
        seed = _TEXT_SEED
        if namespace != PLAIN:
            parts = (namespace.cache_salt, namespace.extra_key, namespace.lora)
            seed = _sha256(seed + _encoded(*parts))
        return _chain(text, page_tokens * TEXT_BYTES_PER_TOKEN, seed)

    def _scope(self, namespace: Namespace) -> bytes | None:
        """Seed of the names outside the common namespace. Events scope the names of LoRA requests
        by an id that only the engine knows; such blocks get names that no engine publishes, so they
        are never taken for another adapter's."""
        if namespace.lora is None and (self._as_published or namespace.extra_key is None):
            return None
        return _sha256(_SCOPE_TAG + _encoded(namespace.extra_key, namespace.lora))


def _chain(data: str | bytes | memoryview, page_bytes: int, digest: bytes) -> array[int]:
    step = max(1, _PIECE_BYTES // page_bytes) * page_bytes
    names = array("q")
    for piece in _pieces_of(data, step):
        # The end of a prompt seldom comes again as it is.
        hashed = _known_pages if len(piece) == step else _hash_pages
        more, digest = hashed(piece, page_bytes, digest)
        names.frombytes(more)
        if len(names) >= MAX_NAMES:
            break
    return names[:MAX_NAMES]


def _pieces_of(data: str | bytes | memoryview, size: int) -> Iterator[bytes]:
    """``data`` in pieces of ``size`` bytes, and what is left. A text is encoded as it goes."""
    piece = b""
    for at in range(0, len(data), size):
        part = data[at : at + size]
        piece += part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        while len(piece) >= size:
            yield piece[:size]
            piece = piece[size:]
    yield piece


def _hash_pages(data: bytes, page_bytes: int, digest: bytes) -> tuple[bytes, bytes]:
    """Names of the full pages in this machine's byte order, and the digest of the last one."""
    digests = []
    sha256 = hashlib.sha256
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        digest = sha256(digest + data[start : start + page_bytes]).digest()
        digests.append(digest)
    names = struct.unpack(">" + "q24x" * len(digests), b"".join(digests))
    return array("q", names).tobytes(), digest


def _known_pages(data: bytes, page_bytes: int, digest: bytes) -> tuple[bytes, bytes]:
    """As :func:`_hash_pages`, remembered by a digest, as the data would be most of what is kept."""
    size = page_bytes.to_bytes(16)
    key = hashlib.blake2b(data, digest_size=16, key=digest, person=size).digest()
    found = _known.get(key)
    if found is None:
        found = _known[key] = _hash_pages(data, page_bytes, digest)
    with suppress(KeyError):  # another thread has dropped it meanwhile
        _known.move_to_end(key)
        if len(_known) > _MAX_PIECES:
            _known.popitem(last=False)
    return found


def _scoped(names: array[int], scope: bytes) -> array[int]:
    """As SGLang's ``namespaced_block_hash``."""
    digests = (_sha256(scope + name.to_bytes(8, "big", signed=True)) for name in names)
    return array("q", (int.from_bytes(digest[:8], signed=True) for digest in digests))


def _encoded(*parts: str | None) -> bytes:
    """Unambiguous for any strings and their absence."""
    return json.dumps(parts).encode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
