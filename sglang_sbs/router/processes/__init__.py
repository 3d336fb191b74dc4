"""Several processes: front ends, the scheduler's process, and what they say to each other."""
