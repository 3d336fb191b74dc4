"""For all tests: a machine that is busy is no defect, and no test asks Hugging Face."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("harness")

settings.register_profile(
    "busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy machine")

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cluster") is not None:
        from harness.nurseries import share_imports_of_sglang

        share_imports_of_sglang()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: Sequence[pytest.Item]) -> None:
    """Which tests stay in one process where several share them (``--dist loadgroup``): those of a
    file, all real clusters, of which a machine of two cores holds one at a time, and those that ask
    one process that has imported SGLang."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        shared = (name for name in ("cluster", "sglang") if item.get_closest_marker(name))
        group = next(shared, item.nodeid.partition("::")[0])
        item.add_marker(pytest.mark.xdist_group(group))
