"""`python -m tools.cpu_engine`: can this machine run CPU engines?

Imports all that an engine imports and starts none. As a side effect Python keeps the compiled
modules, so that the first engine starts as fast as later ones.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tools.cpu_engine.environment import cpu_engine_environment

LAST_LINES = 15


def main() -> None:
    """Exit 0 if the engine's modules import; otherwise exit 1 with the end of the traceback."""
    # A nursery whose stdin has ended imports SGLang, says so, and ends.
    command = [sys.executable, "-m", "tools.cpu_engine.nursery"]
    added = cpu_engine_environment(1, inherited=os.environ) | {"PYTHONDONTWRITEBYTECODE": ""}
    finished = subprocess.run(
        command, env=os.environ | added, input="", capture_output=True, text=True, check=False
    )
    if finished.returncode != 0 or "ready" not in finished.stdout:
        last_lines = "\n".join(finished.stderr.splitlines()[-LAST_LINES:])
        sys.exit(f"{last_lines}\nSGLang does not import on this machine: run scripts/install again")
    print("CPU engines can run: SGLang imports")


if __name__ == "__main__":
    main()
