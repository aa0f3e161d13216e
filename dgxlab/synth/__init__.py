"""Synthetic models: an F16 GGUF with seeded Gaussian weights, of llama or a Qwen with experts or a gated delta net.

Good for shapes and throughput, not for quality. The bytes depend only on the recipe: a weight is 16 bits of PCG64's raw
stream, which NumPy keeps stable, mapped by a table of normal quantiles. NumPy's samplers are not used: they may change
(and the table is three times as fast). A tensor's stream depends on the seed and the tensor's name, not on the order.

Only this module imports gguf and numpy, and only inside functions: the agent carries it to hosts that may have neither.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from dgxlab.errors import RemoteError, SpecError, command
from dgxlab.model import SyntheticModel
from dgxlab.quantise import MXFP4
from dgxlab.synth.tensors import EXPERTS, LINEAR, Tensor, active, head_dim, stream_key, tensors

if TYPE_CHECKING:
    import gguf

_EXPERT_FIELDS = ("n_expert", "n_expert_used", "n_ff_expert", "n_ff_shared", "routing_skew")
_LINEAR_FIELDS = (
    "ssm_state",
    "ssm_k_heads",
    "ssm_v_heads",
    "ssm_conv",
    "decay_min",
    "decay_max",
    "full_attention_interval",
)

VOCABULARIES = {"llama-spm": 32000}
"""Number of tokens of the vocabularies that a recipe may name; llama.cpp's tree has them as GGUF files."""

_CHUNK = 1 << 23  # weights made at a time: 16 MiB of F16

_BLOCKS = (
    (r"F32|F16|BF16|COPY", 1),
    (r"Q[0-9]_[01]|IQ4_NL|MXFP4.*", 32),
    (r"NVFP4.*", 64),
    (r"(Q[0-9]_K|I?T?Q[0-9]_).*", 256),
)
"""Weights in one block, by a regex of llama-quantize's type names; the first match counts."""


def check(recipe: SyntheticModel) -> None:
    """Raise a SpecError, naming a field and its rule, if llama.cpp could not load or quantise the recipe's model."""
    known = VOCABULARIES.get(recipe.vocab, recipe.n_vocab)
    if recipe.vocab and recipe.vocab not in VOCABULARIES:
        raise SpecError(f"vocab {recipe.vocab!r} cannot be used: supported is {', '.join(VOCABULARIES)}")
    if recipe.n_vocab != known:
        message = f"n_vocab {recipe.n_vocab} is not what vocab {recipe.vocab} has: {known}"
        raise SpecError(message, next=f"set n_vocab: {known}")
    if recipe.plain_text and not recipe.vocab:
        raise SpecError("plain_text needs vocab: without one no token has a text", next="set vocab: llama-spm")
    _check_architecture(recipe)
    if recipe.n_head % recipe.n_head_kv:
        raise SpecError(f"n_head {recipe.n_head} is no multiple of n_head_kv {recipe.n_head_kv}")
    # a row that is no whole number of blocks makes llama-quantize abort, or fall back to another type in silence
    block = next((length for pattern, length in _BLOCKS if re.fullmatch(pattern, recipe.quant.upper())), 1)
    for name, width in _widths(recipe).items():
        if width % block:
            best = f"set {name}: {math.ceil(width / block) * block}" if hasattr(recipe, name) else ""
            raise SpecError(f"{name} {width} is no multiple of {block}, the block length of {recipe.quant}", next=best)


def _check_architecture(recipe: SyntheticModel) -> None:
    experts, linear = recipe.arch in EXPERTS, recipe.arch in LINEAR
    own = {*(_EXPERT_FIELDS if experts else ()), *(_LINEAR_FIELDS if linear else ())}
    own |= {"head_dim"} if recipe.arch != "llama" else set()
    own -= {"n_ff_shared"} if recipe.arch == "qwen3moe" else set()
    plain = SyntheticModel()
    for name in ("head_dim", *_EXPERT_FIELDS, *_LINEAR_FIELDS):
        if name not in own and getattr(recipe, name) != getattr(plain, name):
            raise SpecError(f"{name} means nothing for architecture {recipe.arch}", next=f"remove {name}")
    if recipe.arch == "llama" and (recipe.n_embd % recipe.n_head or (recipe.n_embd // recipe.n_head) % 2):
        raise SpecError(f"n_embd {recipe.n_embd} does not give {recipe.n_head} heads (n_head) of an even width")
    if recipe.head_dim % 8:
        raise SpecError(f"head_dim {recipe.head_dim} is no multiple of 8")
    if experts and recipe.n_expert_used > recipe.n_expert:
        raise SpecError(f"n_expert_used {recipe.n_expert_used} is more than n_expert, which is {recipe.n_expert}")
    if recipe.quant == MXFP4 and not experts:
        # llama-quantize gives Q8_0 throughout, and the file's name says MXFP4
        raise SpecError(f"{MXFP4} is for experts, and {recipe.arch} has none", next="set arch: qwen3moe")
    if linear and recipe.ssm_v_heads % recipe.ssm_k_heads:
        raise SpecError(f"ssm_v_heads {recipe.ssm_v_heads} is no multiple of ssm_k_heads {recipe.ssm_k_heads}")
    if linear and recipe.n_layer < recipe.full_attention_interval:
        raise SpecError(
            f"n_layer {recipe.n_layer} is below full_attention_interval {recipe.full_attention_interval}: no layer "
            "would have attention",
            next=f"set n_layer: {recipe.full_attention_interval}",
        )
    if linear and recipe.decay_min > recipe.decay_max:
        raise SpecError(f"decay_min {recipe.decay_min:g} is more than decay_max, which is {recipe.decay_max:g}")


def _widths(recipe: SyntheticModel) -> dict[str, int]:
    """Return the lengths of rows that are quantised, by the field that sets them."""
    widths = {"n_embd": recipe.n_embd}
    if recipe.arch not in EXPERTS:
        widths["n_ff"] = recipe.n_ff
    else:
        widths["n_ff_expert"] = recipe.n_ff_expert
        if recipe.arch != "qwen3moe":
            widths["n_ff_shared"] = recipe.n_ff_shared
    if recipe.arch != "llama":
        widths["n_head * head_dim"] = recipe.n_head * recipe.head_dim
    if recipe.arch in LINEAR:
        widths["ssm_v_heads * ssm_state"] = recipe.ssm_v_heads * recipe.ssm_state
    return widths


def size(recipe: SyntheticModel) -> int:
    """Return how many bytes the tensors of a recipe's F16 file will have."""
    return sum(tensor.nbytes for tensor in tensors(recipe))


def vocabulary_path(recipe: SyntheticModel) -> str:
    """Return the path of a recipe's vocabulary in llama.cpp's tree."""
    return f"models/ggml-vocab-{recipe.vocab}.gguf"


def write(recipe: SyntheticModel, out: Path, vocabulary: Path | None = None) -> None:
    """Write the F16 GGUF of a recipe to `out` atomically.

    Args:
        vocabulary: llama.cpp's GGUF file of the vocabulary that the recipe names; None if it names none.

    Raises:
        SpecError: if the recipe cannot be made, or the vocabulary has another number of tokens.
        RemoteError: if the gguf package is missing here, or the disk is full.
    """
    check(recipe)
    try:
        import gguf
    except ImportError as error:
        raise RemoteError(
            f"a synthetic model needs the gguf package, which this Python does not have: {error}",
            next="install gguf for the Python that hosts.yaml names, or let the client make the model",
        ) from error
    partial = out.with_name(out.name + ".tmp")
    try:
        tokenizer = _tokenizer(recipe, vocabulary) if vocabulary else {}
        _write(gguf.GGUFWriter(partial, recipe.arch), recipe, tokenizer)
        partial.replace(out)
        folder = os.open(out.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # so that the rename itself survives a power cut
        finally:
            os.close(folder)
    except OSError as error:
        message = f"could not write the synthetic model {out} ({size(recipe) / 1e9:.1f} GB): {error.strerror}"
        raise RemoteError(message, next=command("df", "-h", out.parent)) from error
    finally:
        partial.unlink(missing_ok=True)


def _tokenizer(recipe: SyntheticModel, vocabulary: Path) -> dict[str, Any]:
    import gguf

    fields = gguf.GGUFReader(vocabulary).fields
    tokenizer = {name: field for name, field in fields.items() if name.startswith("tokenizer.")}
    count = len(tokenizer["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in tokenizer else 0
    if count != recipe.n_vocab:
        raise SpecError(f"vocab {recipe.vocab} of the pin has {count} tokens, not {recipe.n_vocab}, which n_vocab says")
    return tokenizer


def _write(writer: gguf.GGUFWriter, recipe: SyntheticModel, tokenizer: Mapping[str, Any]) -> None:
    """Write header and tensors. The writer lays out the file; the weights go past it, a chunk at a time."""
    import gguf
    import numpy as np

    wanted = tensors(recipe)
    _metadata(writer, recipe)
    if not tokenizer:
        # the count of dummy tokens comes from <arch>.vocab_size; no tokenizer means no token ever has a text
        writer.add_tokenizer_model("no_vocab")
    for name, field in tokenizer.items():
        kind, *of = field.types
        writer.add_key_value(name, field.contents(), kind, of[0] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in wanted:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(tensor.dtype), tensor.nbytes)
    mute: list[int] = []
    if recipe.plain_text:
        textless = (gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.BYTE)
        types = tokenizer["tokenizer.ggml.token_type"].contents()
        mute = [token for token, kind in enumerate(types) if kind in textless]
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (out,) = writer.fout or []
        writer.write_padding(out, out.tell())
        for tensor in wanted:
            for chunk in _chunks(tensor, recipe.seed, mute if tensor.name == "output.weight" else []):
                out.write(chunk)
            writer.write_padding(out, tensor.nbytes)
        out.flush()
        os.fsync(out.fileno())
    finally:
        for file in writer.fout or []:
            file.close()


def _metadata(writer: gguf.GGUFWriter, recipe: SyntheticModel) -> None:
    import gguf

    dim = head_dim(recipe)
    linear = recipe.arch in LINEAR
    writer.add_name("dgxlab synthetic")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(recipe.n_vocab)
    writer.add_context_length(recipe.n_ctx_train)
    writer.add_embedding_length(recipe.n_embd)
    writer.add_block_count(recipe.n_layer)
    writer.add_feed_forward_length(recipe.n_ff)
    writer.add_head_count(recipe.n_head)
    writer.add_head_count_kv(recipe.n_head_kv)
    rotated = dim // 4 if linear else dim
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if recipe.arch != "llama":
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if recipe.arch in EXPERTS:
        writer.add_expert_count(recipe.n_expert)
        writer.add_expert_used_count(recipe.n_expert_used)
        writer.add_expert_feed_forward_length(recipe.n_ff_expert)
        if recipe.arch != "qwen3moe":
            writer.add_expert_shared_feed_forward_length(recipe.n_ff_shared)
    if linear:
        writer.add_ssm_conv_kernel(recipe.ssm_conv)
        writer.add_ssm_state_size(recipe.ssm_state)
        writer.add_ssm_group_count(recipe.ssm_k_heads)
        writer.add_ssm_time_step_rank(recipe.ssm_v_heads)
        writer.add_ssm_inner_size(recipe.ssm_state * recipe.ssm_v_heads)
        writer.add_full_attention_interval(recipe.full_attention_interval)
        if recipe.arch != "qwen3next":  # pairs that turn by time, height and width; all three are the place in a text
            third = rotated // 6
            writer.add_rope_dimension_sections([rotated // 2 - 2 * third, third, third, 0])


def _chunks(tensor: Tensor, seed: int, mute: Sequence[int]) -> Iterator[Any]:
    """Yield the tensor's little-endian values, at most _CHUNK of them at a time; rows that are mute are 0."""
    import numpy as np

    if tensor.values:
        yield np.resize(np.array(tensor.values, dtype=tensor.dtype), tensor.size)
        return
    stream = np.random.PCG64(int.from_bytes(stream_key(tensor.name, seed), "big"))
    table = np.array([z * tensor.sigma for z in _quantiles()], dtype=tensor.dtype)
    rows, width = tensor.shape[0], tensor.size // tensor.shape[0]
    factors = np.exp(-tensor.skew * np.arange(rows) / max(1, rows - 1)).astype(tensor.dtype)
    factors[mute] = 0
    for start in range(0, tensor.size, _CHUNK):
        count = min(_CHUNK, tensor.size - start)
        # four weights from each 64-bit word; _CHUNK is a multiple of four, so chunking does not change the stream
        words = stream.random_raw(math.ceil(count / 4)).astype("<u8", copy=False)
        values = table[words.view("<u2")[:count]]
        if tensor.skew or mute:
            values *= factors[np.arange(start, start + count) // width]
        yield values


@cache
def _quantiles() -> list[float]:
    """Return the 65,536 midpoint quantiles of the standard normal: one for each value of 16 random bits."""
    half = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)]
    return [-z for z in reversed(half)] + half
