"""Trials compare the policy in force with a baseline on live traffic, in alternating slots.

- :mod:`.spec`: the settings, e.g. the policies to compare.
- :mod:`.trial`: which policy is in force now (sans-I/O: events and ``now`` in, commands out).
- :mod:`.slots`: which requests count.
- :mod:`.sequential`: the confidence interval of the result.
- :mod:`.report`: the report for the API, the dashboard and the metrics.

Trials run in the router (``router/trials.py``) and in the simulator
(``simulator/experiments/trials.py``)."""
