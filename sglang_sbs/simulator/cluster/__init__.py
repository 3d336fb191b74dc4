"""The simulated cluster: engines, their caches, and the time their passes take."""
