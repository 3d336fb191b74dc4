"""The cost of a pass and the latencies around it, fitted to event logs of real engines."""
