"""The effect of one hostile sender on everybody else: ``scripts/bench-hostile``."""
