"""Submits requests to the scheduler from asyncio, and delivers its decisions."""
