"""Trials compare the policy in force with a baseline on live traffic, in alternating slots.

:mod:`.spec` says what is compared, :mod:`.trial` which policy decides now (sans-I/O: events and
``now`` in, commands out), :mod:`.slots` what is counted, :mod:`.sequential` how sure the verdict
is, and :mod:`.report` how it is shown. The router drives it (``router/trials.py``), and so does the
simulator (``simulator/experiments/trials.py``)."""
