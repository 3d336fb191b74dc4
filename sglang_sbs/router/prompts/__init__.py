"""Tokenizes prompts, estimates their lengths, and names their KV blocks."""
