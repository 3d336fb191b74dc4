"""The GPUs of planned engines: no two share one."""

from __future__ import annotations

import re

import pytest
from harness.planned_clusters import DP_ATTENTION, plan, value


def test_each_instance_has_gpus_of_its_own() -> None:
    planned = plan(prefill_instances=2, engine_flags=DP_ATTENTION)
    first, *others = planned.instances
    assert "--base-gpu-id" not in first.argv
    assert [value(other.argv, "--base-gpu-id") for other in others] == ["2", "4"]


def test_dp_without_dp_attention_multiplies_the_gpus() -> None:
    planned = plan(engine_flags=("--tp-size=2", "--dp-size", "3", "--pp-size", "2"))
    assert value(planned.instances[1].argv, "--base-gpu-id") == "12"


def test_roles_of_different_sizes_share_no_gpu() -> None:
    planned = plan(
        prefill_instances=2,
        decode_instances=2,
        engine_flags=("--tp", "2"),
        prefill_flags=("--tp", "4", "--attn-dp-size", "4"),
        decode_flags=("--dp-size", "3"),
    )
    first, *others = planned.instances
    assert "--base-gpu-id" not in first.argv
    assert [value(other.argv, "--base-gpu-id") for other in others] == ["4", "8", "14"]


@pytest.mark.parametrize("spelling", [("--base-gpu-id", "4"), ("--base-gpu-id=4",)])
def test_a_role_begins_at_a_first_gpu_of_its_own(spelling: tuple[str, ...]) -> None:
    planned = plan(decode_instances=2, engine_flags=("--tp", "2"), decode_flags=spelling)
    prefill, first, second = (" ".join(instance.argv) for instance in planned.instances)
    assert "--base-gpu-id" not in prefill
    assert re.findall(r"--base-gpu-id[ =](\d+)", first) == ["4"]
    assert re.findall(r"--base-gpu-id[ =](\d+)", second) == ["6"]


def test_a_users_first_gpu_and_step_are_kept() -> None:
    planned = plan(engine_flags=("--tp", "2", "--base-gpu-id", "8", "--gpu-id-step", "2"))
    assert [value(instance.argv, "--base-gpu-id") for instance in planned.instances] == ["8", "12"]
    planned = plan(engine_flags=("--tp", "2", "--base-gpu-id=8"))
    second = planned.instances[1].argv
    assert "--base-gpu-id=8" not in second
    assert value(second, "--base-gpu-id") == "10"


def test_each_node_has_gpus_of_its_own() -> None:
    flags = ("--tp", "4", "--dp", "4", "--enable-dp-attention")
    prefill, decode = plan(prefill_nodes=2, engine_flags=flags).instances
    assert "--base-gpu-id" not in prefill.argv
    assert value(prefill.followers[0].argv, "--base-gpu-id") == "2"
    assert value(decode.argv, "--base-gpu-id") == "4"
