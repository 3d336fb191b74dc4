"""What one hostile sender does to everybody else: ``scripts/bench-hostile``."""
