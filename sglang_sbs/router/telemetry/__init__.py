"""What the router says of itself: metrics, log, traces."""
