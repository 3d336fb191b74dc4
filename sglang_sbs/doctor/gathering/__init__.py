"""Asking engines and a router; nothing is judged here."""
