"""Records which DP ranks hold which KV blocks."""
