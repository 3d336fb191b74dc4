"""The simulated cluster: engines, their caches, and the duration of their passes."""
