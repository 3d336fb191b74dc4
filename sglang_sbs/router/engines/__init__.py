"""HTTP to engines: connections, response parsing, URLs."""
