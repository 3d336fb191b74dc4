"""Staggered Batch Scheduling (SBS) for SGLang clusters with PD disaggregation and DP attention. The
parts, and what each may know, are listed in ``docs/architecture.md``."""

__version__ = "0.2.0"
