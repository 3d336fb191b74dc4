"""Checks clients' request bodies and headers, splits batches, and builds the engines' requests."""
