"""From a request to its ranks: the scheduler, driven from asyncio."""
