"""Judging what was gathered; nothing is asked here."""
