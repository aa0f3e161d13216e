"""Synthetic models: an F16 GGUF of llama shape with seeded Gaussian weights.

Good for shapes and throughput, not for quality. The recipe is the identity, so the bytes depend on nothing else: a
weight is 16 bits of PCG64's raw stream, which NumPy promises to keep, looked up in a table of normal quantiles, and not
from its samplers, which it may improve (the table is also three times as fast). One tensor's stream depends on the seed
and the tensor's own name, so order does not matter.

Only this module imports gguf and numpy, and only inside functions: the agent carries it to hosts that may have neither.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from dgxlab.errors import RemoteError, SpecError, command
from dgxlab.model import SyntheticModel

if TYPE_CHECKING:
    import gguf

ARCHITECTURES = ("llama",)
"""What `write` can make."""
SIGMA = 0.02
"""Standard deviation of a weight, as trained models start out and roughly end."""

VOCABULARIES = {"llama-spm": 32000}
"""The pin's vocabularies that a model can be given, by name, and how many tokens they have."""

LAYER_SCALE = 0.5
"""Smallest `.scale` of a matrix; they go up to twice that. Published NVFP4 models have far smaller ones, but larger
blocks: what is checked is that they are multiplied with."""

NVFP4 = "NVFP4"
"""The one type that llama-quantize has no name for: matrices of layers get it, embeddings and output stay F16."""

CHUNK = 1 << 23
"""Weights made at a time: 16 MiB of F16, whatever the size of the model."""

BLOCKS = (
    (r"F32|F16|BF16|COPY", 1),
    (r"Q[0-9]_[01]|IQ4_NL|MXFP4.*", 32),
    (r"NVFP4.*", 64),
    (r"(Q[0-9]_K|I?T?Q[0-9]_).*", 256),
)
"""Weights in one block, by llama-quantize's name of the type; first match."""


@dataclass(frozen=True)
class Tensor:
    """One tensor to write.

    Attributes:
        name: As llama.cpp calls it.
        shape: Rows first, as NumPy has it: (out features, in features), or (n,) for a norm, (1,) for a scale.
        sigma: Standard deviation of its weights; 0 for what is F32: a norm, which is 1 everywhere, or a scale.
    """

    name: str
    shape: tuple[int, ...]
    sigma: float

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        return self.size * (2 if self.sigma else 4)


def check(recipe: SyntheticModel) -> None:
    """Refuse a recipe that llama.cpp could not load or quantise, before anything is written.

    Raises:
        SpecError: naming the field, what it is and what it must be.
    """
    if recipe.arch not in ARCHITECTURES:
        raise SpecError(
            f"synthetic models of architecture {recipe.arch!r} cannot be made: supported is {', '.join(ARCHITECTURES)}",
            next=f"set arch: {ARCHITECTURES[0]}",
        )
    known = VOCABULARIES.get(recipe.vocab, recipe.n_vocab)
    if recipe.vocab and recipe.vocab not in VOCABULARIES:
        raise SpecError(f"vocab {recipe.vocab!r} cannot be used: supported is {', '.join(VOCABULARIES)}")
    if recipe.n_vocab != known:
        raise SpecError(
            f"n_vocab {recipe.n_vocab} is not what vocab {recipe.vocab} has: {known}", next=f"set n_vocab: {known}"
        )
    for name in ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "n_vocab", "n_ctx_train"):
        if getattr(recipe, name) < 1:
            raise SpecError(f"{name} of a synthetic model must be at least 1, not {getattr(recipe, name)}")
    if recipe.seed < 0:
        raise SpecError(f"seed of a synthetic model must not be negative, not {recipe.seed}")
    if recipe.n_embd % recipe.n_head or (recipe.n_embd // recipe.n_head) % 2:
        raise SpecError(f"n_embd {recipe.n_embd} does not give {recipe.n_head} heads (n_head) of an even width")
    if recipe.n_head % recipe.n_head_kv:
        raise SpecError(f"n_head {recipe.n_head} is no multiple of n_head_kv {recipe.n_head_kv}")
    # a row that is no whole number of blocks makes llama-quantize abort, or fall back to another type in silence
    block = next((length for pattern, length in BLOCKS if re.fullmatch(pattern, recipe.quant.upper())), 1)
    for name in ("n_embd", "n_ff"):
        if getattr(recipe, name) % block:
            raise SpecError(
                f"{name} {getattr(recipe, name)} is no multiple of {block}, the block length of {recipe.quant}",
                next=f"set {name}: {math.ceil(getattr(recipe, name) / block) * block}",
            )


def tensors(recipe: SyntheticModel) -> tuple[Tensor, ...]:
    """List the tensors in file order. Embeddings and output are not tied, as in llama models of 7B and more."""
    kv_width = recipe.n_embd // recipe.n_head * recipe.n_head_kv
    result = [Tensor("token_embd.weight", (recipe.n_vocab, recipe.n_embd), SIGMA)]
    width, hidden = recipe.n_embd, recipe.n_ff
    # what adds to the residual stream is scaled down, so that its variance does not grow with the number of layers
    residual = SIGMA / math.sqrt(2 * recipe.n_layer)
    parts: list[tuple[str, tuple[int, ...], float]] = [
        ("attn_norm", (width,), 0.0),
        ("attn_q", (width, width), SIGMA),
        ("attn_k", (kv_width, width), SIGMA),
        ("attn_v", (kv_width, width), SIGMA),
        ("attn_output", (width, width), residual),
        ("ffn_norm", (width,), 0.0),
        ("ffn_gate", (hidden, width), SIGMA),
        ("ffn_up", (hidden, width), SIGMA),
        ("ffn_down", (width, hidden), residual),
    ]
    matrices = [name for name, shape, _ in parts if len(shape) == 2] if recipe.scales else []
    for i in range(recipe.n_layer):
        result += [Tensor(f"blk.{i}.{name}.weight", shape, sigma) for name, shape, sigma in parts]
        result += [Tensor(f"blk.{i}.{name}.scale", (1,), 0.0) for name in matrices]
    result.append(Tensor("output_norm.weight", (recipe.n_embd,), 0.0))
    result.append(Tensor("output.weight", (recipe.n_vocab, recipe.n_embd), SIGMA))
    return tuple(result)


def size(recipe: SyntheticModel) -> int:
    """Return the bytes of tensor data in the F16 file, to say how large it is before it is made or sent."""
    return sum(tensor.nbytes for tensor in tensors(recipe))


def vocabulary_path(recipe: SyntheticModel) -> str:
    """Return where a recipe's vocabulary lies in llama.cpp's tree."""
    return f"models/ggml-vocab-{recipe.vocab}.gguf"


def quantize_argv(quant: str, pure: bool) -> tuple[str, ...]:
    """Return how llama-quantize makes a type, {in} and {out} for the files; () where F16 is what is wanted."""
    if quant == "F16":
        return ()
    if quant != NVFP4:
        return ("{bin}/llama-quantize", *(("--pure",) if pure else ()), "{in}", "{out}", quant)
    types = ("--tensor-type", "blk=nvfp4", "--output-tensor-type", "f16", "--token-embedding-type", "f16")
    # a type by tensor's name counts only where the file's own type is quantised; nothing is left that gets Q8_0
    return ("{bin}/llama-quantize", *types, "{in}", "{out}", "Q8_0")


def write(recipe: SyntheticModel, out: Path, vocabulary: Path | None = None) -> None:
    """Write the recipe's F16 GGUF to `out`, whole or not at all.

    Args:
        vocabulary: llama.cpp's GGUF of the recipe's vocabulary, None where it has none.

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
        raise RemoteError(
            f"could not write the synthetic model {out} ({size(recipe) / 1e9:.1f} GB): {error.strerror}",
            next=command("df", "-h", out.parent),
        ) from error
    finally:
        partial.unlink(missing_ok=True)


# -- the file ---------------------------------------------------------------------------------------------------------


def _tokenizer(recipe: SyntheticModel, vocabulary: Path) -> dict[str, Any]:
    """Return what a vocabulary's file says of its tokenizer, as the reader's fields.

    Raises:
        SpecError: if it has not as many tokens as the recipe says.
    """
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
    writer.add_name("dgxlab synthetic")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(recipe.n_vocab)
    writer.add_context_length(recipe.n_ctx_train)
    writer.add_embedding_length(recipe.n_embd)
    writer.add_block_count(recipe.n_layer)
    writer.add_feed_forward_length(recipe.n_ff)
    writer.add_head_count(recipe.n_head)
    writer.add_head_count_kv(recipe.n_head_kv)
    writer.add_rope_dimension_count(recipe.n_embd // recipe.n_head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if not tokenizer:
        # the count of dummy tokens comes from <arch>.vocab_size; no tokenizer means no token ever has a text
        writer.add_tokenizer_model("no_vocab")
    for name, field in tokenizer.items():
        kind, *of = field.types
        writer.add_key_value(name, field.contents(), kind, of[0] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in wanted:
        dtype = np.dtype(np.float16 if tensor.sigma else np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, dtype, tensor.nbytes)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        (out,) = writer.fout or []
        writer.write_padding(out, out.tell())
        for tensor in wanted:
            for chunk in _chunks(tensor, recipe.seed):
                out.write(chunk)
            writer.write_padding(out, tensor.nbytes)
        out.flush()
        os.fsync(out.fileno())
    finally:
        for file in writer.fout or []:
            file.close()


def _chunks(tensor: Tensor, seed: int) -> Iterator[Any]:
    """Yield the tensor's little-endian values, at most CHUNK of them at a time."""
    import numpy as np

    name = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
    if tensor.name.endswith(".scale"):
        yield np.array([LAYER_SCALE * (1 + name[0] / 256)], dtype="<f4")
        return
    if not tensor.sigma:
        yield np.ones(tensor.size, dtype="<f4")
        return
    stream = np.random.PCG64(int.from_bytes(name, "big"))
    table = np.array([z * tensor.sigma for z in _quantiles()], dtype="<f2")
    for start in range(0, tensor.size, CHUNK):
        count = min(CHUNK, tensor.size - start)
        # four weights from each 64-bit word; CHUNK is a multiple of four, so chunking does not change the stream
        words = stream.random_raw(math.ceil(count / 4)).astype("<u8", copy=False)
        yield table[words.view("<u2")[:count]]


@cache
def _quantiles() -> list[float]:
    """Return the 65,536 midpoint quantiles of the standard normal: one for each value of 16 random bits."""
    half = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)]
    return [-z for z in reversed(half)] + half
