"""What the scheduler does, live, for people: the page at ``/dashboard`` and ``sglang-sbs top``.

:mod:`.recorder` watches the scheduler's events (sans-I/O), :mod:`.feed` makes frames of it five
times a second while somebody looks and hands them out, :mod:`.pages` is the HTTP surface,
:mod:`.client` and :mod:`.top` are the terminal's side. With ``--workers N`` the recorder is in the
scheduler's process, and :mod:`sglang_sbs.router.processes.dashboard_leases` and
:mod:`sglang_sbs.router.processes.dashboard_feed` carry its frames to the front ends. Nothing here
changes what is scheduled, and nothing runs while nobody looks.
"""
