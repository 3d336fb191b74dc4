"""Stand-in for triton.runtime on CPU engines: see `tools/cpu_engine/absent_package.py`.

Asking the driver for the device fails here as it does in triton on a machine without a GPU.
"""

from tools.cpu_engine import absent_package

absent_package.install(__name__, driver=absent_package.NoDriver("triton.runtime.driver"))
