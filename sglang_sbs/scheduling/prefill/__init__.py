"""Estimated state of prefill instances: ranks, passes, and when the next one ends."""
