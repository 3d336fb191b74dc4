"""The policies: which requests leave now, for which instance and which DP ranks."""
