"""Submits requests to the scheduler, which dispatches them; driven from asyncio."""
