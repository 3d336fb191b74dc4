"""Workloads: arrivals, conversations, classes, named scenarios."""
