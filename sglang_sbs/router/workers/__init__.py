"""Workers: their discovery, limits, health and use."""
