"""A Qwen3-MoE model folder small enough to make on the spot and to serve from one CPU core.

A function of the constants in this file. Imports neither torch nor transformers, so that the
router, mock engines and the demo can use its tokenizer.

    python -m tools.cpu_engine.tiny_model out/tiny-model

The weights are real, not SGLang's `--load-format dummy` ones: dummy values depend on how the
model is sharded and are so small (1e-3) that greedy output is one token whatever the prompt.
These are drawn at a scale where the hidden state depends on the whole prompt and logits are well
apart, so that greedy decoding in float32 (serve it with `--dtype float32`) tells prompts apart and
does not flip with the shape of the batch.
"""

from __future__ import annotations

import argparse
import array
import hashlib
import json
import math
import os
import random
import shutil
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VOCAB_SIZE = 512
HIDDEN_SIZE = 64
NUM_LAYERS = 2
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 16
NUM_EXPERTS = 8
EXPERTS_PER_TOKEN = 2
EXPERT_SIZE = 32
MAX_POSITIONS = 40960
WEIGHT_SEED = 20512
# Gain of the projections that write into the residual stream: at 1 the embedding of the last token
# alone would decide the next one.
RESIDUAL_GAIN = 2.0
LM_HEAD_GAIN = 4.0

BOS_TOKEN = "<|endoftext|>"
EOS_TOKEN = "<|im_end|>"
SPECIAL_TOKENS = (BOS_TOKEN, "<|im_start|>", EOS_TOKEN)

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_TOKENIZER_TEXT = """
the of and to in is that it for was on are as with his they at be this have from or one had by
word but not what all were we when your can said there use an each which she do how their if will
up other about out many then them these so some her would make like him into time has look two more
write go see number no way could people my than first water been call who oil its now find long
down day did get come made may part over new sound take only little work know place year live me
back give most very after thing our just name good sentence man think say great where help through
much before line right too mean old any same tell boy follow came want show also around form three
small set put end does another well large must big even such because turn here why ask went men read
need land different home us move try kind hand picture again change off play spell air away animal
house point page letter mother answer found study still learn should world request prefill decode
batch token schedule stagger forward pass rank expert attention router engine cluster latency queue
throughput capacity interval instance dispatch parallel memory cache model serving window balance
"""


def model_config() -> dict[str, Any]:
    """Contents of `config.json` (transformers' `Qwen3MoeConfig`)."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "bos_token_id": SPECIAL_TOKENS.index(BOS_TOKEN),
        "decoder_sparse_step": 1,
        "dtype": "float32",
        "eos_token_id": SPECIAL_TOKENS.index(EOS_TOKEN),
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "max_position_embeddings": MAX_POSITIONS,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": EXPERT_SIZE,
        "norm_topk_prob": True,
        "num_attention_heads": NUM_HEADS,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": NUM_LAYERS,
        "num_key_value_heads": NUM_KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
    }


def write_tiny_model(directory: Path) -> Path:
    """Write the model into `directory`, replacing what is there; returns `directory`. It appears
    complete or not at all, so concurrent writers do no harm.

    Raises: NotADirectoryError: `directory` exists and is a file.
    """
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file: name a directory for the tiny model")
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=directory.name + ".", dir=directory.parent))
    staging.chmod(0o755)
    try:
        _write_json(staging / "config.json", model_config())
        _write_tokenizer(staging)
        _write_weights(staging / "model.safetensors")
        if directory.exists():
            shutil.rmtree(directory)
        os.replace(staging, directory)
    except OSError:
        shutil.rmtree(staging, ignore_errors=True)
        if not (directory / "model.safetensors").exists():
            raise
    return directory


def cached_tiny_model() -> Path:
    """Folder of the tiny model in the user's cache, made when it is not there yet. Its name carries
    a fingerprint of this file: a changed model is a new folder."""
    fingerprint = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = home / "sglang-sbs" / f"tiny-model-{fingerprint}"
    there = (directory / "model.safetensors").exists()
    return directory if there else write_tiny_model(directory)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path) -> None:
    """Byte-level BPE trained on the built-in text: any input round-trips, id < `VOCAB_SIZE`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB_SIZE,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator([" " + " ".join(_TOKENIZER_TEXT.split())], trainer)
    if (size := tokenizer.get_vocab_size()) != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer text yields {size} tokens, not {VOCAB_SIZE}")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "bos_token": BOS_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS_TOKEN,
        "model_max_length": MAX_POSITIONS,
        "pad_token": BOS_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(directory / "tokenizer_config.json", config)


def _tensors() -> Iterator[tuple[str, tuple[int, ...], float]]:
    """(name, shape, standard deviation; 0 means a norm's ones) of each weight."""
    query, key_value = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    into_hidden = HIDDEN_SIZE**-0.5
    yield "model.embed_tokens.weight", (VOCAB_SIZE, HIDDEN_SIZE), 1.0
    for index in range(NUM_LAYERS):
        layer = f"model.layers.{index}."
        yield layer + "input_layernorm.weight", (HIDDEN_SIZE,), 0
        yield layer + "self_attn.q_proj.weight", (query, HIDDEN_SIZE), into_hidden
        yield layer + "self_attn.k_proj.weight", (key_value, HIDDEN_SIZE), into_hidden
        yield layer + "self_attn.v_proj.weight", (key_value, HIDDEN_SIZE), into_hidden
        output_std = RESIDUAL_GAIN * query**-0.5
        yield layer + "self_attn.o_proj.weight", (HIDDEN_SIZE, query), output_std
        yield layer + "self_attn.q_norm.weight", (HEAD_DIM,), 0
        yield layer + "self_attn.k_norm.weight", (HEAD_DIM,), 0
        yield layer + "post_attention_layernorm.weight", (HIDDEN_SIZE,), 0
        yield layer + "mlp.gate.weight", (NUM_EXPERTS, HIDDEN_SIZE), into_hidden
        for expert in range(NUM_EXPERTS):
            mlp = f"{layer}mlp.experts.{expert}."
            yield mlp + "gate_proj.weight", (EXPERT_SIZE, HIDDEN_SIZE), into_hidden
            yield mlp + "up_proj.weight", (EXPERT_SIZE, HIDDEN_SIZE), into_hidden
            down_std = RESIDUAL_GAIN * EXPERT_SIZE**-0.5
            yield mlp + "down_proj.weight", (HIDDEN_SIZE, EXPERT_SIZE), down_std
    yield "model.norm.weight", (HIDDEN_SIZE,), 0
    yield "lm_head.weight", (VOCAB_SIZE, HIDDEN_SIZE), LM_HEAD_GAIN * into_hidden


def _write_weights(path: Path) -> None:
    """Write the safetensors file: u64 header length, JSON header, raw little-endian float32.

    Values are uniform, from `random.random`, whose sequence Python guarantees for a seed.
    """
    draw = random.Random(WEIGHT_SEED).random
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape, std in _tensors():
        half_width = std * 3**0.5
        drawn = (half_width * (2 * draw() - 1) if std else 1.0 for _ in range(math.prod(shape)))
        values = array.array("f", drawn)
        if sys.byteorder == "big":
            values.byteswap()
        start = len(body)
        body += values.tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, len(body)]}
    header_bytes = json.dumps(header).encode()
    header_bytes += b" " * (-len(header_bytes) % 8)
    path.write_bytes(struct.pack("<Q", len(header_bytes)) + header_bytes + bytes(body))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.cpu_engine.tiny_model",
        description="Write the tiny Qwen3-MoE model folder that tests and the demo serve.",
        epilog="Example: python -m tools.cpu_engine.tiny_model out/tiny-model",
    )
    parser.add_argument("directory", nargs="?", type=Path, help="default: the user's cache")
    directory = parser.parse_args().directory
    print(cached_tiny_model() if directory is None else write_tiny_model(directory))


if __name__ == "__main__":
    main()
