"""The tiny model's folder: complete, the same every time, and usable as a tokenizer."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.cpu_engine import tiny_model

FILES = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_two_writings_are_byte_for_byte_equal(model: Path, tmp_path: Path) -> None:
    again = tiny_model.write_tiny_model(tmp_path / "again")
    assert {path.name for path in again.iterdir()} == FILES
    for name in FILES:
        assert (model / name).read_bytes() == (again / name).read_bytes(), name


def test_an_existing_folder_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "stale").touch()
    tiny_model.write_tiny_model(directory)
    assert {path.name for path in directory.iterdir()} == FILES
    assert list(tmp_path.iterdir()) == [directory]


def test_a_file_in_the_way_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    path.touch()
    with pytest.raises(NotADirectoryError, match=str(path)):
        tiny_model.write_tiny_model(path)


def test_the_cached_folder_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = tiny_model.cached_tiny_model()
    made_ns = (first / "model.safetensors").stat().st_mtime_ns
    assert first.is_relative_to(tmp_path)
    assert tiny_model.cached_tiny_model() == first
    assert (first / "model.safetensors").stat().st_mtime_ns == made_ns


def test_any_text_round_trips_through_the_tokenizer(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for text in ("the quick brown fox", "naïve – 東京 🚀\n\t{}", ""):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert all(len(tiny_model.SPECIAL_TOKENS) <= token < tiny_model.VOCAB_SIZE for token in ids)


def test_special_tokens_are_those_of_the_config(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert config["vocab_size"] == tokenizer.get_vocab_size() == tiny_model.VOCAB_SIZE
    assert config["bos_token_id"] == tokenizer.token_to_id(tiny_model.BOS_TOKEN)
    assert config["eos_token_id"] == tokenizer.token_to_id(tiny_model.EOS_TOKEN)
    assert config["max_position_embeddings"] > 32 * 1024


def test_weights_cover_the_file_and_have_the_shapes_of_the_config(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (header_length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_length])
    assert header.pop("__metadata__") == {"format": "pt"}
    end = 0
    for name, tensor in header.items():
        start, stop = tensor["data_offsets"]
        assert start == end, name
        assert stop - start == 4 * math.prod(tensor["shape"]), name
        end = stop
    assert 8 + header_length + end == len(content) < 5_000_000
    config = json.loads((model / "config.json").read_text())
    embedding = [config["vocab_size"], config["hidden_size"]]
    assert header["model.embed_tokens.weight"]["shape"] == embedding
    experts = {name.split(".")[5] for name in header if ".experts." in name}
    assert len(experts) == config["num_experts"]
