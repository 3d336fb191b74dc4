"""``sglang-sbs demo`` and ``sglang-sbs bench``: real engines with virtual GPU time, under load."""
