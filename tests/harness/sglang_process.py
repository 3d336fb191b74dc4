"""Runs a few lines in a Python process that has SGLang and the plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from tools.cpu_engine.environment import cpu_engine_environment


def ask(program: str, **extra: str) -> dict[str, object]:
    """Run ``program`` next to SGLang; it fills the dict ``answer``."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_SBS_")}
    paths = [os.getcwd(), inherited.pop("PYTHONPATH", "")]
    inherited["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    environ = inherited | cpu_engine_environment(1, inherited=inherited) | extra
    # Only the plugins a test names: not the CPU engine's.
    environ.setdefault("SGLANG_PLUGINS", "none")
    with tempfile.TemporaryDirectory() as folder:
        # A file, as something that SGLang loads leaves standard output non-blocking.
        path = Path(folder, "answer.json")
        end = f"\nfrom pathlib import Path\nPath({str(path)!r}).write_text(json.dumps(answer))"
        source = "import json\nanswer = {}\n" + textwrap.dedent(program) + end
        command = [sys.executable, "-W", "ignore", "-c", source]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(path.read_text())
    return answer | {"log": done.stderr}
