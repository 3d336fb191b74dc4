"""Makes the modules of this folder importable for the tests of its rooms."""
