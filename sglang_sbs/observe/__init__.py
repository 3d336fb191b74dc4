"""``sglang-sbs observe``: records an event log of engines behind any router, from EndForward
alone."""
