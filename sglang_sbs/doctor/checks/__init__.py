"""Judges the gathered facts; sends no requests."""
