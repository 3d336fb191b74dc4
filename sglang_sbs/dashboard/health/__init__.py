"""Is all well, and what was wrong: alerts with cause and advice. Sans-I/O."""
