"""The router as several processes: front ends, the scheduler process, and their messages."""
