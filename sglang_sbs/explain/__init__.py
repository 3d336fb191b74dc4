"""Explains single requests: ``sglang-sbs why`` and ``sglang-sbs log``."""
