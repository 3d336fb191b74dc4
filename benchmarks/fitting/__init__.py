"""The simulator fitted to recorded runs, and compared with them."""
