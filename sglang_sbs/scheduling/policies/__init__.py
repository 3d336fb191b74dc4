"""The policies, which decide which requests leave now, for which instance and DP ranks."""
