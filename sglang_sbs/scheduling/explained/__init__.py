"""Reasons for waits and placements, kept cheaply until someone asks for them."""
