"""Stand-in for triton.language on CPU engines: see `tools/cpu_engine/absent_package.py`."""

from tools.cpu_engine import absent_package

absent_package.install(__name__, constexpr=absent_package.same)
