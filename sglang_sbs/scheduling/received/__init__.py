"""Tracks which messages of an engine are new, lost or outdated, and the source of its load."""
