"""One import of SGLang for all clusters of this process's tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from tools.cpu_engine.environment import cpu_engine_environment
from tools.cpu_engine.nursery import NURSERIES


@cache
def share_imports_of_sglang() -> None:
    """Start what nurseries are forked from, and name it in the environment. Without SGLang it ends,
    and so do they."""
    folder = tempfile.mkdtemp(prefix="nurseries-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder, "socket")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS_")}
    environment |= cpu_engine_environment(1, inherited=environment)
    command = [sys.executable, "-m", "tools.cpu_engine.nurseries", str(path)]
    started = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
    while not path.exists() and started.poll() is None:
        time.sleep(0.01)
    os.environ[NURSERIES] = str(path)
