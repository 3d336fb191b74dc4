"""Several processes: the supervisor, front ends, the scheduler's process, and what they say to each
other.
"""
