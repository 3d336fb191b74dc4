"""The live view of the scheduler: the page at ``/dashboard`` and ``sglang-sbs top``.

:mod:`.recorder` watches the scheduler's events (sans-I/O), :mod:`.feed` makes frames of it while
somebody looks, :mod:`.pages` serves them, :mod:`.client` and :mod:`.top` are the terminal's side.
With ``--frontends N`` the recorder is in the scheduler's process
(``router/processes/dashboard_*``). Nothing here changes what is scheduled."""
