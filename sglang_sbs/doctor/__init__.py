"""``sglang-sbs doctor``: finds faults of a cluster and the flags that fix them. It changes nothing
there. Gathering is separate from judging (``checks/``), which only reads the gathered facts."""
