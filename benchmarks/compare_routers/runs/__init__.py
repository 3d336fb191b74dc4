"""Making a run: engines, a router in front of them, a load, and what was heard of it."""
