"""CPU engines, a virtual GPU, a tiny model and scripted mock engines, for tests, demos and users.

Owns: everything that lets a cluster run without GPUs. Must not be imported by the router, the
scheduler or the engine plugin.
"""
