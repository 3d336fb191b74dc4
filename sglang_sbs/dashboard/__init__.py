"""The live view of the scheduler: the page at ``/dashboard`` and ``sglang-sbs top``.

- :mod:`.recorder` observes the scheduler's events (sans-I/O).
- :mod:`.feed` builds frames of it while a watcher is connected.
- :mod:`.pages` serves the frames; :mod:`.client` and :mod:`.top` show them in a terminal.

With ``--frontends N`` the recorder is in the scheduler's process
(``router/processes/dashboard_*``). The dashboard never affects scheduling."""
