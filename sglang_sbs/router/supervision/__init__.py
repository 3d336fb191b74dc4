"""The parent of the router's processes: it starts and watches them, and lets a successor take the
port."""
