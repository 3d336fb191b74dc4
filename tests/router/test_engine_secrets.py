"""The parts of /server_info that holders of the inference key may see."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from sglang_sbs.router.engine_secrets import names_secret, text_without_secrets, without_secrets

PLANTED = "pl4nted"


@pytest.mark.parametrize(
    "field",
    [
        {"api_key": PLANTED},
        {"password": PLANTED},
        {"PASSWORD": PLANTED},
        {"ADMIN_API_KEY": PLANTED},
        {"sslKeyfilePassword": PLANTED},
        {"hf-token": PLANTED},
        {"api_keys": [PLANTED, PLANTED]},
        {"secrets": {"a": {"b": PLANTED}}},
        {"password": 4217},
        {"api_key": 4217},
        {"prefill_api_key": PLANTED},
        {"kv_token_id": PLANTED},
        {"Authorization": f"Bearer {PLANTED}"},
        {"hicache_storage_backend_extra_config": {"user": PLANTED}},
        {"hicache_storage_backend_extra_config": orjson.dumps({"x": [PLANTED]}).decode()},
        {"kv_connector_extra_config": f"{{not JSON {PLANTED}"},
        {"json_model_override_args": f'{{"anything": "{PLANTED}"}}'},
        {"custom": f' {{"password": "{PLANTED}"}}'},
        {"env": {"AWS_ACCESS": PLANTED}},
        {"internal_states": [{"server_args": {"db_password": PLANTED}}]},
        {"otlp_endpoint": f"http://user:{PLANTED}@host:4317"},
        {"model_path": f"s3://bucket/model?X-Signature={PLANTED}&a=b"},
        {"launch": f"python -m x --api-key {PLANTED}"},
        {"launch": f"python -m x --hf-token={PLANTED}"},
        {"launch": f"python -m x --api-key '{PLANTED} {PLANTED}' --tp 8"},
        {"launch": f'python -m x --api-key "{PLANTED} {PLANTED}"'},
        {"launch": f"python -m x --api-key '{PLANTED}"},
        {"command": ["--admin-api-key", PLANTED]},
        {"header": f"bearer {PLANTED}"},
        {"note": f"password: {PLANTED}"},
    ],
    ids=lambda field: str(next(iter(field))),
)
def test_a_planted_secret_is_not_shown(field: dict[str, Any]) -> None:
    for data in (field, {"nested": [field]}, {"encoded": orjson.dumps(field).decode()}):
        shown = orjson.dumps(without_secrets(data)).decode()
        assert PLANTED not in shown and "4217" not in shown


def test_what_people_and_the_doctor_read_stays() -> None:
    data = {
        "model_path": "/models/a-b", "tokenizer_path": "/models/a-b", "dp_size": 8,
        "max_total_num_tokens": 1 << 20, "chunked_prefill_size": 8192, "max_prefill_tokens": 16384,
        "num_reserved_decode_tokens": 512, "skip_tokenizer_init": False, "version": "0.5.23",
        "disaggregation_bootstrap_port": 8998, "dist_init_addr": "10.0.0.1:5000",
        "kv_events_config": '{"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv"}',
        "disable_radix_cache": None, "internal_states": [{"effective_max_running": 3}],
        "sbs": {"boot_id": "ab12", "release": "on"},
    }  # fmt: skip
    assert without_secrets(data) == data


def test_deep_and_large_values_are_hidden_and_not_walked() -> None:
    deep: Any = PLANTED
    for _ in range(900):
        deep = [deep]
    assert PLANTED not in str(without_secrets({"x": deep}))
    assert without_secrets({"x": "a" * (2 << 20)}) == {"x": None}


@pytest.mark.parametrize("name", ["max_tokens", "num_page_tokens", "token_usage", "kv_key_count"])
def test_numbers_of_tokens_are_no_secrets(name: str) -> None:
    assert not names_secret(name, 7)
    assert names_secret(name, "text")


@pytest.mark.parametrize(
    "part",
    ["-", "--key", "token", "token ", "://", "bearer ", "bearer" + " " * 9000, "token='", 'pwd="'],
    ids=lambda part: part.strip()[:8],
)
def test_a_hostile_text_is_looked_through_once(part: str) -> None:
    """Each of these took minutes or seconds for a text of this size when it was tried again from
    every place in it."""
    text = part * (40_000 // len(part))
    shown = text_without_secrets(f"{text} password={PLANTED}")
    assert shown.endswith("password=***")


@pytest.mark.parametrize(
    "shown",
    [
        *("tokens: 60 tokens", "max_new_tokens=1,000", '"n_tokens": 7, x'),
        *("max_tokens: Value error, it is 0", "max_tokens: Input should be", "tokens: Field x"),
    ],
)
def test_how_many_tokens_there_are_is_shown(shown: str) -> None:
    assert text_without_secrets(shown) == shown
    assert text_without_secrets(f"{shown} token={PLANTED}") == f"{shown} token=***"
    assert PLANTED not in text_without_secrets(f"tokens={PLANTED} tokens=1{PLANTED}")
