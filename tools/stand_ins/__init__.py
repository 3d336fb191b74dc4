"""Engines, publishers and a Kubernetes API that are played, for tests. Not in the wheel."""
