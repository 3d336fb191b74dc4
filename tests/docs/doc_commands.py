"""The shell commands of the documentation's fenced blocks.

Owns reading them: continuation lines, comments, pipes, redirections, variables. Must not know what
a command means.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELLS = {"bash", "sh", "shell", "console"}
ELLIPSES = {"...", "…"}
_FENCE = re.compile(r"^(\s*)```(\S*)")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True)
class Command:
    """One simple command; ``line`` is where its statement begins."""

    page: str
    line: int
    environment: dict[str, str]
    words: tuple[str, ...]
    abbreviated: bool
    """It had an ellipsis, which is not in ``words``: flags that are required may be missing."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line} {shlex.join(self.words)}"


def pages() -> list[Path]:
    """Every page of the documentation that there is."""
    root = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
    folders = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    return [page for page in [*root, *folders, ROOT / "patches" / "README.md"] if page.exists()]


def commands_of(text: str, page: str) -> list[Command]:
    """The commands of a page's shell blocks, in order.

    Raises:
        ValueError: a statement that no shell could read; the message has page and line.
    """
    found: list[Command] = []
    for first_line, block in _blocks(text):
        found += _commands_of_block(block, page, first_line)
    return found


def _blocks(text: str) -> Iterator[tuple[int, list[str]]]:
    """Number of its first line, and the lines, of each fenced shell block."""
    indent, language, first, lines = "", None, 0, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence is None:
            if language is not None:
                lines.append(line.removeprefix(indent))
        elif language is None:
            indent, language, first, lines = fence[1], fence[2], number + 1, []
        else:
            if language in SHELLS:
                yield first, lines
            language = None


def _commands_of_block(block: list[str], page: str, first_line: int) -> Iterator[Command]:
    statement, started, heredoc = "", first_line, ""
    for number, line in enumerate(block, start=first_line):
        if heredoc:
            if line.strip() == heredoc:
                heredoc = ""
            continue
        if not statement:
            started = number
        statement += line
        if line.endswith("\\"):
            statement = statement[:-1]
            continue
        try:
            words = _words(statement)
        except ValueError:
            statement += "\n"
            continue
        if "<<" in words:
            heredoc = words[words.index("<<") + 1].lstrip("-")
        yield from _simple_commands(words, page, started)
        statement = ""
    if statement.strip():
        raise ValueError(f"{page}:{started}: a quote or a line is left open: {statement!r}")


def _words(statement: str) -> list[str]:
    lexer = shlex.shlex(_without_comments(statement), posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def _without_comments(statement: str) -> str:
    """A # that begins a word, outside quotes, begins a comment up to the end of the line."""
    kept, quote, comment, before = "", "", False, " "
    for character in statement:
        if character == "\n":
            comment = False
        elif not quote and character == "#" and before.isspace():
            comment = True
        elif not comment and character in ("'", '"') and quote in ("", character):
            quote = "" if quote else character
        if not comment:
            kept += character
        before = character
    return kept


def _simple_commands(words: list[str], page: str, line: int) -> Iterator[Command]:
    current: list[str] = []
    skip = False
    for word in [*words, ";"]:
        if skip:
            skip = False
        elif set(word) <= set("<>&") and set(word) & set("<>"):
            skip = True
            if current and current[-1] in ("1", "2"):
                current.pop()
        elif set(word) <= set(";&|()"):
            if current:
                yield _command(current, page, line)
            current = []
        else:
            current.append(word)


def _command(words: list[str], page: str, line: int) -> Command:
    environment = {}
    while words and _VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        environment[name] = value
    kept = tuple(word for word in words if word not in ELLIPSES)
    return Command(page, line, environment, kept, abbreviated=len(kept) < len(words))
