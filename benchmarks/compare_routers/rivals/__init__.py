"""Routers of other projects that do not run as they are in front of these engines."""
