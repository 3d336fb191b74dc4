"""``sglang-sbs demo``: real engines with virtual GPU time, under load."""
