"""``sglang-sbs doctor``: what is wrong with a cluster, and which flag puts it right.

Changes nothing on them. Gathering (:mod:`.gathering.engines`, :mod:`.gathering.endforward`,
:mod:`.gathering.router`, :mod:`.gathering.pairs`) is apart from judging (``checks/``), which only
reads what was gathered and says what to do about it.
"""
