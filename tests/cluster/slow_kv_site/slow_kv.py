"""SGLang plugin that slows the writes of KV of one prefill instance (``test_sick_prefill.py``).

``SGLANG_SBS_TEST_SLOW_KV`` is a file with the instance's bootstrap port. While it is there, each
write of that instance takes ``WRITE_S`` longer.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

FILE = "SGLANG_SBS_TEST_SLOW_KV"
WRITE_S = 2.5


def register() -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    file = Path(os.environ[FILE])
    send = MooncakeKVManager.send_kvcache

    def send_slowly(manager: Any, *args: Any, **kwargs: Any) -> Any:
        if file.exists() and int(file.read_text()) == manager.bootstrap_port:
            time.sleep(WRITE_S)
        return send(manager, *args, **kwargs)

    MooncakeKVManager.send_kvcache = send_slowly
