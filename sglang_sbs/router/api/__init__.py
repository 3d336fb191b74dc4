"""The HTTP surface: routes, keys, and every endpoint but inference."""
