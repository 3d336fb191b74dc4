"""``sglang-sbs doctor``: what is wrong with a cluster, and which flag puts it right. It changes
nothing there. Gathering is apart from judging (``checks/``), which only reads what was gathered."""
