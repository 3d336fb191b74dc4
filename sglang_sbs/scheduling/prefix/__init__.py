"""Index of the KV blocks that each prefill DP rank has cached."""
