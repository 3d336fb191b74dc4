"""Checks request bodies and headers, splits them, and rewrites them for each leg."""
