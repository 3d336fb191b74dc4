"""Assigns requests to ranks: the scheduler, driven from asyncio."""
