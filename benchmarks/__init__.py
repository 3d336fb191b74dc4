"""Measurements that are made in a checkout; none of it is in the wheel."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""Processes that run a module of ``benchmarks`` start here, wherever their parent is."""
