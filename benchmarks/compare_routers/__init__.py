"""``scripts/compare-routers``: routers side by side on the same real PD cluster, same arrivals.

Sees the engines through HTTP and EndForward, the routers through HTTP only. Must not know how any
of them decides.
"""
