"""The constants of the default policy that were chosen by measurement, and nothing else: what
bounds work or memory (``MOST_``, ``MAX_``) stands where it is used. What half and twice of each
does: docs/lab/constants.md, whose table a test compares with this module."""

AGEING = 5.0
"""What waiting counts against length: a chunk is worth that many batches of waiting in the order of
the queue; and with prompts of many chunks about, the completion of a request that has waited as
long as it takes counts this much more, against what it delays others by. Without it long prompts
give way to short ones for too long."""
SLACK = 0.77
"""So much of what is predicted of the cluster is relied on: of the queue this share must be more
than arrives between two starts for no spacing of them, or more than earlier passes take for a batch
to leave early; and of those that will arrive during a pass this share counts as delayed by whatever
makes it longer."""
ARRIVING_SHARE = 0.6
"""How much of what is expected to arrive until a later pass starts counts as its load now."""
WORTH = 0.95
"""A division of few requests replaces the fluid's if it costs less than so much of it: what passes
take is not known better than that, and whoever is left for later is the tail."""
RATE_PASSES = 10.0
"""Time constant of the arrival rate, in passes: it is asked how much comes in one."""
CHUNK_WEIGHT = 0.4
"""A prompt of n chunks counts like 1 + (n - 1) * this many requests: its delays are the tail."""
AGAIN_WEIGHT = 700.0
"""Times load**2 / (1 - load), what a second of computing again counts: it is one rank's second, and
the barrier makes the others wait for it. Near capacity little more than the optimum is computed."""
TORN_SHARE = 0.05
"""Times the part of the lead beyond the latency, in pass times: the share of batches that may be
left behind in part. The wider requests come apart, the more it costs to wait for the last one."""
