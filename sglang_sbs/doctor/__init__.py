"""``sglang-sbs doctor``: finds faults of a cluster and the flags that fix them, without changing
anything. ``gathering/`` queries engines and router; ``checks/`` judges only the gathered facts."""
