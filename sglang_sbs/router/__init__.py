"""The router: HTTP surface, PD relay, worker registry and what they need.

Owns every socket between clients, engines and the scheduler. Must not know how an instance or a
rank is chosen: that is :mod:`sglang_sbs.scheduling`, which requests reach through
:mod:`.assignment.assigner`.
"""
