"""The scheduler's view of decode instances, and the choice of a decode DP rank."""
