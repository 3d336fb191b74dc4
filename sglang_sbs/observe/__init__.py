"""``sglang-sbs observe``: an event log of engines behind any router, from EndForward alone."""
