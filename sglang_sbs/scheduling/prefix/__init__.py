"""Which DP rank holds which KV blocks."""
