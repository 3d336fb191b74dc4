"""Bookkeeping about an engine's messages themselves: their order, and what they replace."""
