"""Engines and publishers that are played, for tests. Not in the wheel."""
