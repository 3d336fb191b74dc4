"""Checks the project's prose: docstrings, comments, messages, help texts and pages.

Each rule is a function over one paragraph and has a stored count that can only fall.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COUNTS = ROOT / "tools" / "prose_counts.json"
MOST_WORDS = 25


class Prose(NamedTuple):
    file: str
    line: int
    kind: str
    """``docstring``, ``comment``, ``string`` (a message or a help text), ``page``, ``heading``."""
    text: str
    signature: str = ""
    """Names, parameters and types beside a docstring; empty for other kinds."""


class Rule(NamedTuple):
    name: str
    advice: str
    """Words to write instead."""
    breaks: Callable[[Prose], int]
    """Number of times that a paragraph breaks the rule."""


class Finding(NamedTuple):
    prose: Prose
    rule: Rule
    times: int

    def __str__(self) -> str:
        words = " ".join(self.prose.text.split())
        shown = words if len(words) <= 90 else f"{words[:89]}…"
        return f"{self.prose.file}:{self.prose.line}: {self.rule.name}: {shown}"


def _any(pattern: str, *but: str) -> Callable[[Prose], int]:
    """Count matches in prose of all kinds ``but`` some."""
    compiled = re.compile(pattern, re.IGNORECASE)
    return lambda prose: 0 if prose.kind in but else len(compiled.findall(prose.text))


_OPENING = re.compile(r"(Of|That|Those|What|Who|As|By|With|In|At|Needed|Counted|Besides|Told)\b")
_FILLERS = re.compile(
    r"\b(an?|all|and|are|as|at|be|by|each|every|for|from|given|has|have|if|in|into|is|its?|not|of|on|"
    r"one|or|returns?|that|the|this|to|was|were|which|whether|with)\b"
)


def _opens_oddly(prose: Prose) -> int:
    return int(prose.kind == "docstring" and _OPENING.match(prose.text) is not None)


def _long_sentences(prose: Prose) -> int:
    text = re.sub(r"\]\([^)]*\)|`[^`]*`", " x ", prose.text) if prose.kind == "page" else ""
    sentences = re.split(r"(?<=[.!?:;])\s", text)
    return sum(len(re.findall(r"\w[\w'’-]*", sentence)) > MOST_WORDS for sentence in sentences)


def _stems(text: str) -> set[str]:
    split = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text).lower()
    return {
        re.sub(r"(ies|ing|ed|es|s|e|y)$", "", word)
        for word in re.findall(r"[a-z0-9]+", _FILLERS.sub("", split))
    }


def _restates(prose: Prose) -> int:
    return int(bool(prose.signature) and _stems(prose.text) <= _stems(prose.signature))


RULES = (
    Rule("opening", "begin with the subject or a verb, in a full sentence", _opens_oddly),
    Rule("restates", "delete a docstring that its signature already says", _restates),
    Rule(
        "person",
        "name the component: only people are who, nobody or somebody",
        # "A flag whose value ..." is good English. At the start of a sentence it is a person's.
        _any(r"\b(who|whom|nobody|somebody|everybody|anybody)\b|(?:^|[.:;?!]\s+)whose\b"),
    ),
    Rule(
        "speech",
        "components report, send, log and receive; they do not say, tell or hear",
        _any(r"\b(say|says|said|tells?|told|foretold|hears?|heard|spoken|speaks?)\b"),
    ),
    Rule(
        "negation",
        '"is not a X", not "is no X" or "is none"',
        _any(r"\b(?<!there )(is|are|was|were) (none\b|no (?!longer|more\b|less\b|later\b))"),
    ),
    Rule("amount", 'give the number: "at most N"', _any(r"\bso (many|much|long|often)\b")),
    Rule(
        "trailing",
        'drop "besides", "as ever" and ", too"',
        _any(r"\bbesides\b(?=\s*[.,;:)]|$)|\bas ever\b|, too\b(?=\s*[.,;:)]|$)"),
    ),
    Rule(
        "free relative",
        'no "what …" or "who …" as a subject: name the thing',
        # A heading such as "What clients will notice" has no verb, so it is not a subject.
        _any(r"(?:^|[.:;]\s+)(?:What|Who(?:ever)?) (?!to )[^?]*?(?:[.:;]|$)", "heading"),
    ),
    Rule("length", f"a page's sentence has at most {MOST_WORDS} words", _long_sentences),
)


def prose_of_python(file: str, source: str) -> Iterator[Prose]:
    """Docstrings (of attributes as well), comments, and strings of at least three words."""
    tree = ast.parse(source)
    docstrings: set[int] = set()
    for holder in ast.walk(tree):
        body = getattr(holder, "body", None)
        for before, statement in pairwise([holder, *body] if isinstance(body, list) else ()):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text), lineno=line) as docstring):
                    docstrings.add(id(docstring))
                    yield Prose(file, line, "docstring", text.strip(), _signature(before))
    parts = {id(part) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for part in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in docstrings | parts:
            text = _literal(node)
            if len(re.findall(r"[A-Za-z]{2,}", text)) >= 3 and " " in text:
                yield Prose(file, node.lineno, "string", text)
    yield from _comments(file, source)


def _signature(node: ast.AST) -> str:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return " ".join([node.name, *(ast.unparse(n) for n in (node.args, node.returns) if n)])
        case ast.AnnAssign(target=target, annotation=kind):
            return f"{ast.unparse(target)} {ast.unparse(kind)}"
        case ast.Assign(targets=[target]):
            return ast.unparse(target)
        case _:
            return str(getattr(node, "name", ""))


def _literal(node: ast.Constant | ast.JoinedStr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(_literal(p) if isinstance(p, ast.Constant) else "{}" for p in node.values)


def _comments(file: str, source: str) -> Iterator[Prose]:
    first, block = 0, list[str]()
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        comment = re.search(r"(?:^|\s{2})\s*# (?!noqa|type:)(.*)$", line)
        if block and not (comment and line.lstrip().startswith("#")):
            yield Prose(file, first, "comment", " ".join(block))
            block = []
        if comment:
            first = first if block else number
            block.append(comment[1])


def prose_of_page(file: str, source: str) -> Iterator[Prose]:
    """Headings, paragraphs, list items and table rows of a Markdown page, without code blocks."""
    first, block, fenced, kind = 0, list[str](), False, "page"
    for number, line in enumerate([*source.splitlines(), ""], start=1):
        fence = line.lstrip().startswith("```")
        starts = re.match(r"\s*([-*|#>]|\d+\.) ?", line)
        if block and (fence or starts or not line.strip() or kind == "heading"):
            yield Prose(file, first, kind, " ".join(block))
            block = []
        kind = "heading" if line.startswith("#") else "page"
        fenced ^= fence
        if not fenced and not fence and line.strip():
            first = first if block else number
            block.append(re.sub(r"^\s*([-*|#>]+|\d+\.) ", "", line).replace("|", ";").strip())


def findings(root: Path) -> list[Finding]:
    """Breaks of every rule in the package and in the pages, except changelog and laboratory."""
    found = list[Finding]()
    package = sorted((root / "sglang_sbs").rglob("*.py"))
    pages = [*sorted(root.glob("*.md")), *sorted((root / "docs").glob("*.md"))]
    for path in [*package, *(page for page in pages if page.name != "CHANGELOG.md")]:
        read = prose_of_python if path.suffix == ".py" else prose_of_page
        for prose in read(str(path.relative_to(root)), path.read_text()):
            found += [Finding(prose, r, times) for r in RULES if (times := r.breaks(prose))]
    return found


def _lines_since(root: Path, counts: Path) -> set[tuple[str, int]]:
    """File and number of each line added since the counts were stored; empty without Git."""

    def git(*words: str) -> str:
        return subprocess.getoutput(shlex.join(("git", "-C", str(root), *words)))

    added, file = set[tuple[str, int]](), ""
    stored = git("log", "-1", "--format=%H", "--", str(counts))
    for line in git("diff", "-U0", stored).splitlines():
        if line.startswith("+++ b/"):
            file = line[6:]
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            added |= {(file, int(hunk[1]) + after) for after in range(int(hunk[2] or 1))}
    return added


def main(argv: Sequence[str] | None = None, root: Path = ROOT, counts: Path = COUNTS) -> int:
    """Return 0, or 1 if a rule is broken more often than its stored count allows."""
    rules = "\n".join(f"  {rule.name:14} {rule.advice}" for rule in RULES)
    parser = argparse.ArgumentParser(
        prog="scripts/check-prose",
        description="Count the breaks of each prose rule. No count may exceed the stored one\n"
        f"({counts.name}); --lower stores lower counts.\n\nrules:\n{rules}",
        epilog="example: scripts/check-prose --list opening sglang_sbs/router",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lower", action="store_true", help="store the counts that have fallen")
    parser.add_argument("--list", metavar="RULE", help="print every break of RULE (or of all)")
    parser.add_argument("under", nargs="?", default="", help="print only files under this path")
    args = parser.parse_args(argv)
    found, now = findings(root), Counter({rule.name: 0 for rule in RULES})
    for finding in found:
        now[finding.rule.name] += finding.times
    for finding in found if args.list else ():
        if args.list in (finding.rule.name, "all") and finding.prose.file.startswith(args.under):
            print(finding)
    stored: dict[str, int] = json.loads(counts.read_text()) if counts.exists() else dict(now)
    risen = {name for name in now if now[name] > stored.get(name, 0)}
    recent = _lines_since(root, counts) if risen else set()
    for finding in found:
        if finding.rule.name in risen and (finding.prose.file, finding.prose.line) in recent:
            print(f"{finding} ({finding.rule.advice})")
    for name in sorted(risen):
        most = stored.get(name, 0)
        print(f"{name}: {now[name]} breaks, {most} allowed (--list '{name}')", file=sys.stderr)
    fallen = {name: now[name] for name in now if now[name] < stored.get(name, now[name])}
    if args.lower:
        kept = {name: min(number, stored.get(name, number)) for name, number in now.items()}
        counts.write_text(json.dumps(kept, indent=2) + "\n")
    elif fallen:
        print(f"counts have fallen; store them with scripts/check-prose --lower: {fallen}")
    return int(bool(risen))
