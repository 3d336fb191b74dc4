"""Splits a text at its special tokens, in short steps for any text.

One alternation of all tokens would try each of them at every position where one could begin, and a
whole ``re.split`` would hold the interpreter lock. Here the tokens form a prefix tree, so each
character is compared at most once per character of a token, and the text is searched in windows."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

WINDOW_CHARS = 1 << 14
"""Characters searched per call of the regular expression; other threads can run in between."""

_Tree = dict[str, "_Tree"]
_END = ""
"""Key that marks the end of a token in the prefix tree."""


class SpecialTokenCutter:
    def __init__(self, tokens: Collection[str]) -> None:
        """Create a cutter for at least one token, none of them empty."""
        self._same = {token: token for token in tokens}
        """One string per token, yielded for all its occurrences: a text may have a hundred
        thousand."""
        self._longest = max(map(len, tokens))
        tree: _Tree = {}
        for token in tokens:
            node = tree
            for character in token:
                node = node.setdefault(character, {})
            node[_END] = {}
        try:
            self._pattern = re.compile(_pattern_of(tree))
        except RecursionError:  # hundreds of tokens, each a prefix of the next
            longest_first = sorted(tokens, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(re.escape, longest_first)))

    def pieces(self, text: str) -> Iterator[str]:
        """Yield the pieces of a text in order: special tokens (leftmost, longest match), and the
        nonempty text between them."""
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
    """Return a regular expression that matches the longest token of the tree at a position."""
    chain = ""
    while len(tree) == 1 and _END not in tree:
        ((character, tree),) = tree.items()
        chain += re.escape(character)
    branches = [re.escape(key) + _pattern_of(child) for key, child in tree.items() if key != _END]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)}){'?' if _END in tree else ''}"
