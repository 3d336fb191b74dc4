"""The process above the others: it starts and watches them, and lets a successor take the port."""
