"""The router: HTTP surface, PD relay, worker registry and their supporting parts.
:mod:`sglang_sbs.scheduling` chooses instances and ranks."""
