"""The reference pages of the documentation, made from the code: ``scripts/reference --help``."""
