"""Flags that the ``simulate`` commands share."""
