"""``sglang-sbs doctor``: what is wrong with a cluster, and which flag puts it right.

Owns the examination of running engines, and of a router if there is one. Changes nothing on them.
Must not know how requests are scheduled. Gathering (:mod:`.gathering.engines`,
:mod:`.gathering.endforward`, :mod:`.gathering.router`, :mod:`.gathering.pairs`) is apart from
judging (``checks/``), which only reads what was gathered; every finding's meaning is in
:mod:`.catalogue.table`.
"""
