"""The needs of the plugin's hooks in each release of SGLang, as ``docs/compatibility.md`` has
them."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import pytest

from sglang_sbs.engine import install
from sglang_sbs.engine.config import HookConfig
from sglang_sbs.engine.gang_gather import GatherBoard
from sglang_sbs.engine.gang_hold import GangHold
from sglang_sbs.engine.hooks import RankHook
from tools import hook_contract

SCHEDULER = """
from sglang.srt.disaggregation.prefill import Mixin

class Scheduler(Mixin):
    def run_batch(self, batch, pp_proxy_tensors=None): ...
    def process_batch_result(self, batch, result): ...
    def on_idle(self): ...
    def _add_request_to_queue(self, req, is_retracted=False): ...
    def abort_request(self, recv_req): ...
    def maybe_init_rust_server(self): ...
"""
LOOPS = """
class Mixin:
    def get_next_disagg_{role}_batch_to_run(self): ...

    def event_loop_normal_disagg_{role}(self):
        batch = self.get_next_disagg_{role}_batch_to_run()
        result = self.run_batch(batch)
        self.process_batch_result(batch, result)
        self.on_idle()

    def event_loop_overlap_disagg_{role}(self):
        def process_last():
            self.process_batch_result(*self.queue.popleft())

        batch = self.get_next_disagg_{role}_batch_to_run()
        if self.no_overlap:
            process_last()
        self.queue.append((batch, self.run_batch(batch)))
        process_last()
        self.on_idle()
"""
FILES = {
    "sglang/srt/plugins/hook_registry.py": """
class HookRegistry:
    @classmethod
    def register(cls, target, hook, hook_type=None, *, source=None): ...
""",
    "sglang/srt/managers/scheduler.py": SCHEDULER,
    "sglang/srt/managers/scheduler_components/dp_attn.py": """
class MLPSyncBatchInfo:
    attention_pairs: int
    can_run_draft_cuda_graph: bool
    def _get_local_tensor(self, device, dtype=None): ...
    def all_gather(self, device, group): ...
""",
    "sglang/srt/observability/req_time_stats.py": "".join(
        f"class {name}ReqTimeStats:\n"
        "    created_time: float = 0.0\n"
        "    def __getstate__(self): ...\n"
        for name in ("APIServer", "DPController", "Scheduler")
    ),
    "sglang/srt/utils/common.py": "def build_server_info(server_args, scheduler_info): ...",
    "sglang/srt/managers/multi_tokenizer_mixin.py": """
def write_data_for_multi_tokenizer(port_args, server_args, scheduler_info): ...
""",
    "sglang/srt/disaggregation/common/conn.py": """
class CommonKVManager:
    def update_status(self, bootstrap_room, status): ...
""",
    "sglang/srt/disaggregation/decode.py": LOOPS.format(role="decode"),
    "sglang/srt/disaggregation/prefill.py": LOOPS.format(role="prefill")
    + """
class PrefillBootstrapQueue:
    def pop_bootstrapped(self): ...
""",
}


def changed(file: str, old: str, new: str) -> list[str]:
    """The row of a release whose `file` has `new` where the one above has `old`."""
    files = dict(FILES)
    if file:
        path = f"sglang/srt/{file}"
        assert old in files[path]
        files[path] = files[path].replace(old, new)
    return hook_contract.Release(files.get).row()


def test_every_target_of_the_plugin_is_in_the_contract() -> None:
    config = HookConfig(routers=(), bind=None, instance_id="", boot_id="b")
    gather = GatherBoard()
    hold = GangHold(None, "b", gather=gather)
    hooks = install._plugin_hooks(RankHook(config), hold, gather, config)
    covered = {target for targets in hook_contract.COLUMNS.values() for target in targets}
    assert [hook.targets for hook in hooks if not covered & set(hook.targets)] == []


def test_a_release_that_has_everything() -> None:
    assert set(changed("", "", "")) == {"yes"}


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        ("managers/scheduler.py", "def run_batch", "def execute", "no `run_batch`"),
        (
            *("managers/scheduler.py", "(self, batch, result)", "(self, result, batch)"),
            "`process_batch_result(self, result, batch)`",
        ),
        ("managers/scheduler.py", "(Mixin)", "", "no `get_next_disagg_prefill_batch_to_run`"),
        (
            *("disaggregation/common/conn.py", "(self, bootstrap_room, status)", "(self, key)"),
            "`update_status(self, key)`",
        ),
        (
            *("managers/scheduler_components/dp_attn.py", "attention_pairs", "pairs"),
            "no `attention_pairs`",
        ),
        (
            *("observability/req_time_stats.py", "class DPController", "class DPDispatcher"),
            "no `__getstate__`; no `created_time`",
        ),
        ("utils/common.py", "build_server_info", "server_info", "no `build_server_info`"),
        ("plugins/hook_registry.py", "target, hook,", "hook, target,", "`register(cls, hook"),
        (
            *("disaggregation/decode.py", "self.on_idle()", "self.rest()"),
            "`event_loop_normal_disagg_decode`: get_next_disagg_decode_batch_to_run, run_batch, ",
        ),
        (
            *(
                "disaggregation/prefill.py",
                "        process_last()\n        self.on",
                "        self.on",
            ),
            "`event_loop_overlap_disagg_prefill`: ",
        ),
        ("disaggregation/prefill.py", "def event_loop", "def loop", "no event loop of prefill"),
    ],
)
def test_what_a_release_changed_is_reported(file: str, old: str, new: str, expected: str) -> None:
    cells = [cell for cell in changed(file, old, new) if cell != "yes"]
    assert len(cells) == 1
    assert expected in cells[0]


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="needs SGLang's sources")
def test_the_installed_release_is_as_the_page_says() -> None:
    version = metadata.version("sglang")
    site = Path(str(metadata.distribution("sglang").locate_file("")))

    def read(path: str) -> str | None:
        file = site / path
        return file.read_text() if file.is_file() else None

    cells = [version, *hook_contract.Release(read).row()]
    assert f"| {' | '.join(cells)} |" in hook_contract.rows_of_page()


@pytest.mark.registry
def test_the_page_says_what_every_release_has() -> None:
    """Red for a release that the page does not know: run ``python -m tools.hook_contract``, read
    what changed, mend the hooks or put the new line into the page."""
    assert [hook_contract.row_of(release) for release in hook_contract.releases()] == (
        hook_contract.rows_of_page()
    )
