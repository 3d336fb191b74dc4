"""The router's metrics, logs and traces."""
