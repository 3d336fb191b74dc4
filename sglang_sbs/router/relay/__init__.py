"""Relays requests: both legs, retries, aborts and the response."""
