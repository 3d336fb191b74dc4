"""Stand-in for sglang-kernel on CPU engines: see `tools/cpu_engine/absent_package.py`."""

from tools.cpu_engine import absent_package

absent_package.install(__name__, __version__="0.0.0")
