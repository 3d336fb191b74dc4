"""Makes the modules of this folder and ``router_harness`` importable for the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "router")]
