"""Rules for the tests themselves."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PATCHED_TIMING = re.compile(r'setattr\([^()]*\b_?[A-Z][A-Z_]*_S"')


def test_no_test_patches_a_timing() -> None:
    """Timings are arguments with a default, or a frozen record of them: tests give their own."""
    patched = [
        f"{path.relative_to(TESTS)}: {found}"
        for path in sorted(TESTS.rglob("*.py"))
        for found in PATCHED_TIMING.findall(path.read_text())
    ]
    assert patched == []
