"""The cases. Every module of this package is read; each adds its own with ``@case``."""
