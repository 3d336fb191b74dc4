"""``scripts/chaos --ha``: faults of front ends and schedulers on two addresses, under load."""
