"""Making a run: engines, a router in front of them, a load, and the messages received."""
