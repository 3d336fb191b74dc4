"""The client's side of a connection: reading requests and writing responses."""
