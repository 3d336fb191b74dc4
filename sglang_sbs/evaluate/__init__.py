"""``sglang-sbs evaluate``: estimates how another policy would have served recorded traffic."""
