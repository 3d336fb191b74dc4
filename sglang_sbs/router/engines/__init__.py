"""HTTP to the engines: connections, response parsing, URLs."""
