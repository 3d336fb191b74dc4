"""``scripts/measure-gangs``: how whole batches arrive at the engines."""
