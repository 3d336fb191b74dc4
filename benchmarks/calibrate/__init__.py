"""``scripts/calibrate``: a pass-cost model from what engines reported."""
