"""For all tests: a machine that is busy is no defect, and no test asks Hugging Face."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")

os.environ["HF_HUB_OFFLINE"] = "1"
