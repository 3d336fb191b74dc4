"""Stand-in for triton on CPU engines: see `tools/cpu_engine/absent_package.py`."""

import importlib

from tools.cpu_engine import absent_package

absent_package.install(
    __name__,
    __version__="3.4.0",
    autotune=absent_package.decorator,
    cdiv=absent_package.cdiv,
    heuristics=absent_package.decorator,
    jit=absent_package.decorator,
    next_power_of_2=absent_package.next_power_of_2,
)

# As in triton itself, these are attributes once the package is imported.
importlib.import_module("triton.language")
importlib.import_module("triton.runtime")
