"""Makes the harnesses of the scheduler and the router importable here."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "scheduling"), str(TESTS / "router")]
