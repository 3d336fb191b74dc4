"""``scripts/paper-claims``: every claim of the paper beside what is simulated."""
