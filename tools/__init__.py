"""For who works on the project: checks and generated pages. Not in the wheel."""

from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""Processes that run a module of ``tools`` start here, wherever their parent is."""
