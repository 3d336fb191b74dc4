"""Flags shared by the ``simulate`` commands."""
