"""The router: HTTP surface, PD relay, worker registry and what they need. How an instance or a rank
is chosen is :mod:`sglang_sbs.scheduling`'s."""
