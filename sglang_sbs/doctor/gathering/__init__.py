"""Queries engines and a router; judges nothing."""
