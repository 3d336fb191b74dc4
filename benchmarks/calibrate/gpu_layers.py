"""DeepSeek-V3-shaped layers in plain torch: what a prefill pass costs one GPU of an instance.

Needs torch and nothing of SGLang; on a CPU it runs too, with :data:`TINY`.

One GPU computes, per layer, the attention of its DP rank (MLA in its prefill form: latent
projections, causal attention over context and chunk, output projection), with the heads divided by
the attention TP size ``tp / dp``; then its share of the experts (``experts / ep`` of them), to
which the tokens of *all* DP ranks come, and the shared expert's slice. So a pass takes

    fixed + attention(tokens, context and requests of the slowest rank) + experts(tokens of all)

Not in it: communication (all-to-all, all-gather), and kernels better than torch's own. Weights are
random, and every token picks its experts at random, evenly.
"""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import torch
from torch.nn import functional

from sglang_sbs.evaluate.fitting.recording import RecordedPass


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model of DeepSeek-V3's kind and how it is divided; the defaults are V3 as in the paper."""

    hidden: int = 7168
    heads: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    experts: int = 256
    top_k: int = 8
    expert_hidden: int = 2048
    shared_experts: int = 1
    dense_hidden: int = 18_432
    layers: int = 61
    dense_layers: int = 3
    tp: int = 32
    dp: int = 8
    ep: int = 32

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < (0 if name in ("dense_layers", "shared_experts") else 1):
                raise ValueError(f"{name} must be 1 or more, not {getattr(self, name)}")
        if self.tp % self.dp or self.heads % (self.tp // self.dp):
            raise ValueError(
                f"--tp {self.tp} must be a multiple of --dp {self.dp}, and {self.heads} heads one "
                "of tp / dp"
            )
        if self.experts % self.ep:
            raise ValueError(f"--ep {self.ep} must divide the {self.experts} experts")

    @property
    def attention_tp(self) -> int:
        return self.tp // self.dp


TINY = LayerShape(
    hidden=64,
    heads=4,
    q_lora=32,
    kv_lora=16,
    nope=16,
    rope=8,
    value=16,
    experts=8,
    top_k=2,
    expert_hidden=32,
    dense_hidden=128,
    layers=4,
    dense_layers=1,
    tp=2,
    dp=2,
    ep=2,
)


class Layers:
    """One GPU's weights of one attention, one MoE and one dense block."""

    def __init__(self, shape: LayerShape, device: str, dtype: torch.dtype) -> None:
        self.shape, self.device, self.dtype = shape, device, dtype
        generator = torch.Generator(device=device).manual_seed(1)

        def weight(*size: int) -> torch.Tensor:
            made = torch.randn(*size, generator=generator, device=device, dtype=torch.float32)
            return (made / size[-2] ** 0.5).to(dtype)

        heads = shape.heads // shape.attention_tp
        self._heads = heads
        self._q_a = weight(shape.hidden, shape.q_lora)
        self._q_b = weight(shape.q_lora, heads * (shape.nope + shape.rope))
        self._kv_a = weight(shape.hidden, shape.kv_lora + shape.rope)
        self._kv_b = weight(shape.kv_lora, heads * (shape.nope + shape.value))
        self._o = weight(heads * shape.value, shape.hidden)
        local = shape.experts // shape.ep
        self._gate = weight(shape.hidden, shape.experts)
        self._up = weight(local, shape.hidden, 2 * shape.expert_hidden)
        self._down = weight(local, shape.expert_hidden, shape.hidden)
        # The shared expert and the dense layers are divided by the attention's TP, as SGLang does.
        shared = max(1, shape.shared_experts * shape.expert_hidden // shape.attention_tp)
        self._shared_up = weight(shape.hidden, 2 * shared)
        self._shared_down = weight(shared, shape.hidden)
        dense = max(1, shape.dense_hidden // shape.attention_tp)
        self._dense_up = weight(shape.hidden, 2 * dense)
        self._dense_down = weight(dense, shape.hidden)

    def attention(self, chunks: list[tuple[int, int]]) -> None:
        """One layer over a rank's requests, each (context tokens, chunk tokens)."""
        shape, heads = self.shape, self._heads
        tokens = sum(chunk for _, chunk in chunks)
        x = self._hidden(tokens)
        q = (x @ self._q_a) @ self._q_b
        latent = x @ self._kv_a
        done = 0
        outputs = []
        for context, chunk in chunks:
            new = latent[done : done + chunk]
            if context:
                new = torch.cat([new.new_zeros(context, new.shape[1]), new])
            kv = new[:, : shape.kv_lora] @ self._kv_b
            kv = kv.view(context + chunk, heads, shape.nope + shape.value).transpose(0, 1)
            rope = new[:, shape.kv_lora :].expand(heads, -1, -1)
            keys = torch.cat([kv[..., : shape.nope], rope], dim=-1)
            mine = q[done : done + chunk].view(chunk, heads, -1).transpose(0, 1)
            outputs.append(_attend(mine, keys, kv[..., shape.nope :], context))
            done += chunk
        out = torch.cat(
            [output.transpose(0, 1).reshape(-1, heads * shape.value) for output in outputs]
        )
        torch.matmul(out, self._o)

    def experts(self, tokens: int, rank_tokens: int) -> None:
        """One MoE layer: this GPU's experts over its part of ``tokens`` (all ranks'), and the
        shared expert over its own rank's."""
        shape = self.shape
        local = shape.experts // shape.ep
        own = self._hidden(rank_tokens)
        torch.topk(own @ self._gate, shape.top_k)
        routed = tokens * shape.top_k // shape.ep
        x = self._hidden(routed)
        bounds = [routed * i // local for i in range(local + 1)]
        for expert in range(local):
            part = x[bounds[expert] : bounds[expert + 1]]
            if len(part):
                _gated(part, self._up[expert], self._down[expert])
        if shape.shared_experts:
            _gated(own, self._shared_up, self._shared_down)

    def dense(self, tokens: int) -> None:
        _gated(self._hidden(tokens), self._dense_up, self._dense_down)

    def _hidden(self, tokens: int) -> torch.Tensor:
        return torch.ones(tokens, self.shape.hidden, device=self.device, dtype=self.dtype)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: int) -> torch.Tensor:
    """Causal attention of a chunk behind a context; [heads, tokens, width]."""
    if not context:
        return functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
    # Everything before the chunk is seen by all of it; inside, the triangle: two calls whose work
    # is the pairs', merged by nothing, since only the time counts.
    seen = functional.scaled_dot_product_attention(
        q[None], k[None, :, :context], v[None, :, :context]
    )[0]
    inside = functional.scaled_dot_product_attention(
        q[None], k[None, :, context:], v[None, :, context:], is_causal=True
    )[0]
    return seen + inside


def _gated(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, value = (x @ up).chunk(2, dim=-1)
    return torch.mm(functional.silu(gate) * value, down)


# Measuring --------------------------------------------------------------------------------------


def pass_s(layers: Layers, ranks: list[list[tuple[int, int]]], repeats: int) -> float:
    """Seconds of a prefill pass with these requests per rank: that of its slowest rank.

    Each block is timed by itself and counted as often as the model has it.
    """
    shape = layers.shape
    total = sum(chunk for requests in ranks for _, chunk in requests)
    mean = max(1, total // len(ranks))
    different = {tuple(requests) for requests in ranks if requests}
    attention_s = max(
        _timed(partial(layers.attention, list(requests)), layers, repeats) for requests in different
    )
    most = max(sum(chunk for _, chunk in requests) for requests in ranks)
    experts_s = _timed(lambda: layers.experts(total, mean), layers, repeats)
    dense_s = _timed(lambda: layers.dense(most), layers, repeats) if shape.dense_layers else 0.0
    moe_layers = shape.layers - shape.dense_layers
    return shape.layers * attention_s + moe_layers * experts_s + shape.dense_layers * dense_s


def _timed(work: Callable[[], None], layers: Layers, repeats: int) -> float:
    """Median seconds of one call, after one that is not counted."""
    cuda = layers.device.startswith("cuda")
    taken_s = []
    with torch.inference_mode():
        for number in range(repeats + 1):
            if cuda:
                torch.cuda.synchronize()
            started_s = time.perf_counter()
            work()
            if cuda:
                torch.cuda.synchronize()
            if number:
                taken_s.append(time.perf_counter() - started_s)
    return statistics.median(taken_s)


def measured_passes(
    layers: Layers,
    chunk_tokens: int,
    passes: int,
    repeats: int,
    on_progress: Callable[[int], None] = lambda done: None,
) -> list[RecordedPass]:
    """Passes of different sizes, evenness, contexts and numbers of requests, as a log has them.

    At most two ranks differ in what they bring: the fullest and the others, so that a pass costs
    two measurements of attention however many ranks there are.
    """
    rng = random.Random(1)
    found = []
    for number in range(passes):
        most = max(1, round(chunk_tokens * (0.05 + 0.95 * rng.random())))
        others = max(1, round(most * rng.random()))
        context = rng.choice((0, 0, chunk_tokens, 4 * chunk_tokens))
        heavy = _requests(most, rng.choice((1, 2, 4, 8)), context)
        light = _requests(others, 1, 0)
        ranks = [heavy, light][: layers.shape.dp]
        ranks += [light] * (layers.shape.dp - len(ranks))
        took_s = pass_s(layers, ranks, repeats)
        found.append(
            RecordedPass(
                "layers",
                [sum(chunk for _, chunk in requests) for requests in ranks],
                float(number),
                0,
                end_s=float(number) + took_s,
                forward_s=took_s,
                pairs=[sum(n * (c + n / 2) for c, n in requests) for requests in ranks],
                requests=[len(requests) for requests in ranks],
                left_over=[False] * len(ranks),
            )
        )
        on_progress(number + 1)
    return found


def _requests(tokens: int, count: int, context: int) -> list[tuple[int, int]]:
    count = min(count, tokens)
    sizes = [tokens * (i + 1) // count - tokens * i // count for i in range(count)]
    return [(context if i == 0 else 0, size) for i, size in enumerate(sizes)]


def about(device: str, dtype: torch.dtype) -> dict[str, Any]:
    cuda = device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine() + " CPU",
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if cuda else None,
        "dtype": str(dtype).removeprefix("torch."),
    }
