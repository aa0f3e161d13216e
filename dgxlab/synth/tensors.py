"""The tensors of a synthetic model, by architecture: names, shapes, and how their values are drawn."""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, replace

from dgxlab.model import SyntheticModel
from dgxlab.quantise import DECAY

EXPERTS = ("qwen3moe", "qwen35moe", "qwen3next")  # architectures whose layers have experts
LINEAR = ("qwen35", "qwen35moe", "qwen3next")  # architectures with a gated delta net in most layers
_SIGMA = 0.02  # standard deviation of a weight, as trained models start out and roughly end

_LAYER_SCALE = 0.5
"""Smallest `.scale` of a matrix; they go up to twice that. Published NVFP4 models have far smaller ones, but larger
blocks; here they only test that scales are applied."""


@dataclass(frozen=True)
class Tensor:
    """One tensor to write; it has either random weights or fixed `values`."""

    name: str  # as llama.cpp names it
    shape: tuple[int, ...]
    """Rows first, as NumPy has it: (out features, in features), with experts in front where there are any."""
    sigma: float = 0.0  # standard deviation of random weights
    values: tuple[float, ...] = ()  # fixed values of an F32 tensor, repeated to fill it, as 1 for a norm
    f32: bool = False  # random weights are F32, not F16, as llama.cpp requires for routers and convolutions
    skew: float = 0.0  # rows are scaled by a geometric series from 1, for the first, to exp(-skew), for the last

    @property
    def dtype(self) -> str:
        """NumPy's name of the type in the file."""
        return "<f4" if self.f32 or self.values else "<f2"

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        return self.size * int(self.dtype[-1])

    @property
    def is_matrix(self) -> bool:
        """Whether llama-quantize converts the tensor to another type."""
        return self.dtype == "<f2"


def head_dim(recipe: SyntheticModel) -> int:
    """Return the width of an attention head."""
    return recipe.n_embd // recipe.n_head if recipe.arch == "llama" else recipe.head_dim


def tensors(recipe: SyntheticModel) -> tuple[Tensor, ...]:
    """Return a model's tensors in file order. Embeddings and output are not tied, as in llama models of 7B and more."""
    result = [Tensor("token_embd.weight", (recipe.n_vocab, recipe.n_embd), _SIGMA)]
    for i in range(recipe.n_layer):
        norms = ("attn_norm", "post_attention_norm" if recipe.arch in LINEAR else "ffn_norm")
        parts = [Tensor(f"{name}.weight", (recipe.n_embd,), values=(1.0,)) for name in norms]
        has_attention = recipe.arch not in LINEAR or (i + 1) % recipe.full_attention_interval == 0
        parts[1:1] = _attention(recipe) if has_attention else _delta_net(recipe)
        parts += _experts(recipe) if recipe.arch in EXPERTS else _feed_forward("", (), recipe.n_ff, recipe)
        result += [replace(part, name=f"blk.{i}.{part.name}") for part in parts]
        for part in parts if recipe.scales else ():
            if part.is_matrix and not re.search(DECAY, part.name):
                name = f"blk.{i}.{part.name.removesuffix('.weight')}.scale"
                scale = _LAYER_SCALE * (1 + stream_key(name, recipe.seed)[0] / 256)
                result.append(Tensor(name, part.shape[:-2] or (1,), values=(scale,)))
    result.append(Tensor("output_norm.weight", (recipe.n_embd,), values=(1.0,)))
    result.append(Tensor("output.weight", (recipe.n_vocab, recipe.n_embd), _SIGMA))
    return tuple(result)


def _residual(recipe: SyntheticModel) -> float:
    """Return the sigma of matrices that add to the residual stream: its variance must not grow with the layers."""
    return _SIGMA / math.sqrt(2 * recipe.n_layer)


def _attention(recipe: SyntheticModel) -> list[Tensor]:
    dim, width = head_dim(recipe), recipe.n_embd
    gate = 2 if recipe.arch in LINEAR else 1  # q and the gate of the output, one after the other in each head
    parts = [
        Tensor("attn_q.weight", (gate * recipe.n_head * dim, width), _SIGMA),
        Tensor("attn_k.weight", (recipe.n_head_kv * dim, width), _SIGMA),
        Tensor("attn_v.weight", (recipe.n_head_kv * dim, width), _SIGMA),
        Tensor("attn_output.weight", (width, recipe.n_head * dim), _residual(recipe)),
    ]
    norms = ("attn_q_norm", "attn_k_norm") if recipe.arch != "llama" else ()
    return parts + [Tensor(f"{name}.weight", (dim,), values=(1.0,)) for name in norms]


def _delta_net(recipe: SyntheticModel) -> list[Tensor]:
    heads, width = recipe.ssm_v_heads, recipe.n_embd
    keys, values = recipe.ssm_state * recipe.ssm_k_heads, recipe.ssm_state * heads
    # the log of each head's decay per token is a geometric series from -decay_min to -decay_max
    ratio = recipe.decay_max / recipe.decay_min
    decays = tuple(-recipe.decay_min * ratio ** (head / max(1, heads - 1)) for head in range(heads))
    parts = [
        Tensor("attn_qkv.weight", (2 * keys + values, width), _SIGMA),
        Tensor("attn_gate.weight", (values, width), _SIGMA),
        Tensor("ssm_conv1d.weight", (2 * keys + values, recipe.ssm_conv), 0.5, f32=True),
        # the log of a token's decay is ssm_a softplus(alpha x + dt); here softplus(dt) is 1
        Tensor("ssm_dt.bias", (heads,), values=(math.log(math.e - 1),)),
        Tensor("ssm_a", (heads,), values=decays),
        Tensor("ssm_norm.weight", (recipe.ssm_state,), values=(1.0,)),
        Tensor("ssm_out.weight", (width, values), _residual(recipe)),
    ]
    if recipe.arch == "qwen3next":
        return [*parts, Tensor("ssm_ba.weight", (2 * heads, width), _SIGMA)]
    return parts + [Tensor(f"{name}.weight", (heads, width), _SIGMA) for name in ("ssm_alpha", "ssm_beta")]


def _experts(recipe: SyntheticModel) -> list[Tensor]:
    router = (recipe.n_expert, recipe.n_embd)
    parts = [Tensor("ffn_gate_inp.weight", router, _SIGMA, f32=True, skew=recipe.routing_skew)]
    parts += _feed_forward("_exps", (recipe.n_expert,), recipe.n_ff_expert, recipe)
    if recipe.arch != "qwen3moe":
        parts.append(Tensor("ffn_gate_inp_shexp.weight", (recipe.n_embd,), _SIGMA, f32=True))
        parts += _feed_forward("_shexp", (), recipe.n_ff_shared, recipe)
    return parts


def _feed_forward(suffix: str, front: tuple[int, ...], hidden: int, recipe: SyntheticModel) -> list[Tensor]:
    return [
        Tensor(f"ffn_gate{suffix}.weight", (*front, hidden, recipe.n_embd), _SIGMA),
        Tensor(f"ffn_up{suffix}.weight", (*front, hidden, recipe.n_embd), _SIGMA),
        Tensor(f"ffn_down{suffix}.weight", (*front, recipe.n_embd, hidden), _residual(recipe)),
    ]


def active(recipe: SyntheticModel) -> int:
    """Return the number of matrix weights in the layers that one token uses: of the experts, only the selected ones."""
    share = recipe.n_expert_used / recipe.n_expert
    parts = [part for part in tensors(recipe) if part.name.startswith("blk.") and part.is_matrix]
    return round(sum(part.size * (share if "_exps." in part.name else 1) for part in parts))


def stream_key(name: str, seed: int) -> bytes:
    """Return the 32-byte seed of a tensor's random stream, by the tensor's name and the recipe's seed."""
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()
