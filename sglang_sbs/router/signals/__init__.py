"""Receives EndForward and KV events from engines and binds them to workers."""
