"""Computes the names that SGLang's KV events use for the full pages of a prompt.

The input is token ids; the output is the signed 64-bit names that an engine publishes for them
(``BlockStored.block_hashes``).

A page's digest is SHA-256 over the previous page's digest and the page's token ids as little-endian
uint32. Its name is the first 8 bytes, big-endian (``get_native_hash`` and ``hash_str_to_int64`` in
SGLang's ``mem_cache/utils.py``). A name therefore identifies a page *and* everything before it, and
prompts with a common beginning share names. Chains are cached in pieces of about a thousand tokens,
so that only new text is hashed."""

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
"""Limit on block names per prompt; later pages are not matched."""
COARSE_TOKENS = 64
"""Smallest block, in tokens, if no engine publishes KV events. A block is then the fewest pages
with at least this many tokens. The index needs about 300 bytes per block, and with pages of one
token a prompt would have as many blocks as tokens."""
TEXT_BYTES_PER_TOKEN = 4
"""Bytes of text that count as a token in block names without a tokenizer."""

_PIECE_BYTES = 4096
_MAX_PIECES = 4096
"""Limit on the pieces whose names are cached: 4 million tokens, in 2 MiB with pages of 64 tokens or
35 MiB with pages of one."""
_known: OrderedDict[bytes, tuple[bytes, bytes]] = OrderedDict()
_SCOPE_TAG = b"sglang-sbs-namespace-v1"
_TEXT_SEED = hashlib.sha256(b"sglang-sbs-text-v1").digest()


class BlockFormat(NamedTuple):
    page_tokens: int
    bigram: bool = False
    """True with EAGLE, which keys its KV cache by pairs of neighbouring tokens (one fewer)."""


class BlockNamer:
    """Computes the block names of prompts; usable from several threads."""

    def __init__(self, *, as_published: bool = True) -> None:
        """Create a namer. ``as_published``: names are those in KV events, which do not depend on a
        namespace's ``extra_key``. Otherwise every namespace gets names of its own, which suits
        engines that publish no events."""
        self._as_published = as_published

    def names(
        self, ids: list[int] | array[int], blocks: BlockFormat, namespace: Namespace = PLAIN
    ) -> array[int]:
        """Return the names of the full pages, at most ``MAX_NAMES``. Raises: ValueError, an entry
        is not a token id."""
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
        """Name text that could not be tokenized, with ``TEXT_BYTES_PER_TOKEN`` bytes per token. The
        names only match text that was sent before, never an engine's events."""
        seed = _TEXT_SEED
        if namespace != PLAIN:
            parts = (namespace.cache_salt, namespace.extra_key, namespace.lora)
            seed = _sha256(seed + _encoded(*parts))
        return _chain(text, page_tokens * TEXT_BYTES_PER_TOKEN, seed)

    def _scope(self, namespace: Namespace) -> bytes | None:
        """Return the key that makes the namespace's names differ from those of plain requests;
        ``None``: they do not differ. In KV events a LoRA request's names depend on an id known only
        to the engine. Here they get names that no engine publishes and no other adapter has."""
        if namespace.lora is None and (self._as_published or namespace.extra_key is None):
            return None
        return _sha256(_SCOPE_TAG + _encoded(namespace.extra_key, namespace.lora))


def _chain(data: str | bytes | memoryview, page_bytes: int, digest: bytes) -> array[int]:
    step = max(1, _PIECE_BYTES // page_bytes) * page_bytes
    names = array("q")
    for piece in _pieces_of(data, step):
        # The last, incomplete piece of a prompt rarely occurs again.
        hashed = _known_pages if len(piece) == step else _hash_pages
        more, digest = hashed(piece, page_bytes, digest)
        names.frombytes(more)
        if len(names) >= MAX_NAMES:
            break
    return names[:MAX_NAMES]


def _pieces_of(data: str | bytes | memoryview, size: int) -> Iterator[bytes]:
    """Yield ``data`` in pieces of ``size`` bytes, then the rest. Text is encoded piece by piece."""
    piece = b""
    for at in range(0, len(data), size):
        part = data[at : at + size]
        piece += part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        while len(piece) >= size:
            yield piece[:size]
            piece = piece[size:]
    yield piece


def _hash_pages(data: bytes, page_bytes: int, digest: bytes) -> tuple[bytes, bytes]:
    """Return the names of the full pages (packed int64, this machine's byte order) and the last
    page's digest. ``digest``: that of the page before ``data``."""
    digests = []
    sha256 = hashlib.sha256
    for start in range(0, len(data) - page_bytes + 1, page_bytes):
        digest = sha256(digest + data[start : start + page_bytes]).digest()
        digests.append(digest)
    names = struct.unpack(">" + "q24x" * len(digests), b"".join(digests))
    return array("q", names).tobytes(), digest


def _known_pages(data: bytes, page_bytes: int, digest: bytes) -> tuple[bytes, bytes]:
    """Return the same as :func:`_hash_pages`, from a cache if possible. The cache is keyed by a
    digest, because the data would take more memory."""
    size = page_bytes.to_bytes(16)
    key = hashlib.blake2b(data, digest_size=16, key=digest, person=size).digest()
    found = _known.get(key)
    if found is None:
        found = _known[key] = _hash_pages(data, page_bytes, digest)
    with suppress(KeyError):  # another thread dropped it meanwhile
        _known.move_to_end(key)
        if len(_known) > _MAX_PIECES:
            _known.popitem(last=False)
    return found


def _scoped(names: array[int], scope: bytes) -> array[int]:
    """Return the names changed by ``scope``, as SGLang's ``namespaced_block_hash`` does."""
    digests = (_sha256(scope + name.to_bytes(8, "big", signed=True)) for name in names)
    return array("q", (int.from_bytes(digest[:8], signed=True) for digest in digests))


def _encoded(*parts: str | None) -> bytes:
    """Encode strings and ``None`` so that different ``parts`` never give the same bytes."""
    return json.dumps(parts).encode()


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()
