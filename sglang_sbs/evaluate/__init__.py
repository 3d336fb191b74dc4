"""``sglang-sbs evaluate``: what another policy would have made of recorded traffic."""
