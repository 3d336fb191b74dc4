"""``scripts/paper-claims``: the paper's claims about prefill beside simulations."""
