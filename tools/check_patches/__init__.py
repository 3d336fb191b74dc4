"""``scripts/check-patches``: every patch on the very release it is for."""
