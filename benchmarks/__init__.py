"""Measurements that are made in a checkout; none of it is in the wheel."""
