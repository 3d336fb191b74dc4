"""Which features are on in a deployment: the table of ``doctor --features``."""
