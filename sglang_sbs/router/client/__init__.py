"""The client's side of a connection: what comes in, and how its answer goes out."""
