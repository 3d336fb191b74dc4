"""Cutting a text at its special tokens, in steps that are short however odd the text is.

One alternation of all tokens tries each of them wherever one of them could begin, and a whole
``re.split`` keeps the interpreter to itself. Here the tokens are a prefix tree, so a character is
looked at once per character of a token at most, and the text is searched in windows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

WINDOW_CHARS = 1 << 14
"""Searched in one call: other threads run between calls."""

_Tree = dict[str, "_Tree"]
_END = ""
"""The key that marks where a token ends."""


class SpecialTokenCutter:
    def __init__(self, tokens: Collection[str]) -> None:
        """``tokens``: at least one, none empty."""
        self._same = {token: token for token in tokens}
        """A text may have a hundred thousand tokens: they share one string."""
        self._longest = max(map(len, tokens))
        tree: _Tree = {}
        for token in tokens:
            node = tree
            for character in token:
                node = node.setdefault(character, {})
            node[_END] = {}
        try:
            self._pattern = re.compile(_pattern_of(tree))
        except RecursionError:  # each of hundreds of tokens is the beginning of the next
            longest_first = sorted(tokens, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def pieces(self, text: str) -> Iterator[str]:
        """The tokens, leftmost and longest first, and what is between them; nothing empty."""
        start = at = 0
        while at < len(text):
            end = min(len(text), at + WINDOW_CHARS)
            # A token may begin in this window and end in the next.
            for found in self._pattern.finditer(text, at, end + self._longest - 1):
                if found.start() >= end:
                    break
                if found.start() > start:
                    yield text[start : found.start()]
                yield self._same[found.group()]
                start = found.end()
            at = max(end, start)
        if start < len(text):
            yield text[start:]


def _pattern_of(tree: _Tree) -> str:
    """A regular expression for the longest token of the tree that begins here."""
    chain = ""
    while len(tree) == 1 and _END not in tree:
        ((character, tree),) = tree.items()
        chain += re.escape(character)
    branches = [re.escape(key) + _pattern_of(child) for key, child in tree.items() if key != _END]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if _END in tree else ''}"
