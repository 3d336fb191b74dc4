"""Estimated state of prefill instances: DP ranks, passes, and when the next pass ends."""
