"""Records runs of a real cluster, and compares the fitted simulator with them."""
