"""``scripts/chaos``: faults on a real cluster under load."""
