"""Explains requests to people: ``sglang-sbs why`` and ``sglang-sbs log``."""
