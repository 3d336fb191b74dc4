"""Decides which scheduler is active, as seen by schedulers and front ends, with or without a
lock."""
