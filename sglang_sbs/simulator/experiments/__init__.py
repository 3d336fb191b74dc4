"""The simulated experiments and the presentation of their results."""
