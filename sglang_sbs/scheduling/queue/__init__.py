"""The queue: its requests, their order, and early refusal."""
