"""Who waits, in which order, and who is refused instead."""
