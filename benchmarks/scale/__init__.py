"""``scripts/bench-scale``: how large a cluster one router takes."""
