"""Prompts: their tokens, their length, and the names of their KV blocks."""
