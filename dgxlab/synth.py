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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, BinaryIO

from dgxlab.errors import RemoteError, SpecError, command
from dgxlab.model import SyntheticModel

if TYPE_CHECKING:
    import gguf

ARCHITECTURES = ("llama",)
"""What `write` can make."""

SIGMA = 0.02
"""Standard deviation of a weight, as trained models start out and roughly end."""

CHUNK = 1 << 23
"""Weights made at a time: 16 MiB of F16, whatever the size of the model."""

BLOCKS = (
    (re.compile(r"(F32|F16|BF16|COPY)"), 1),
    (re.compile(r"(Q[0-9]_[01]|IQ4_NL|MXFP4.*)"), 32),
    (re.compile(r"NVFP4.*"), 64),
    (re.compile(r"(Q[0-9]_K|I?T?Q[0-9]_).*"), 256),
)
"""Weights in one block, by llama-quantize's name of the type; first match."""


@dataclass(frozen=True)
class Tensor:
    """One tensor to write.

    Attributes:
        name: As llama.cpp calls it.
        shape: Rows first, as NumPy has it: (out features, in features), or (n,) for a norm.
        sigma: Standard deviation of its weights; 0 for a norm, which is 1 everywhere and F32.
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
    for name in ("n_layer", "n_embd", "n_ff", "n_head", "n_head_kv", "n_vocab", "n_ctx_train"):
        if getattr(recipe, name) < 1:
            raise SpecError(f"{name} of a synthetic model must be at least 1, not {getattr(recipe, name)}")
    if recipe.seed < 0:
        raise SpecError(f"seed of a synthetic model must not be negative, not {recipe.seed}")
    _check_heads(recipe)
    _check_rows(recipe)


def tensors(recipe: SyntheticModel) -> tuple[Tensor, ...]:
    """List the tensors in file order. Embeddings and output are not tied, as in llama models of 7B and more."""
    kv_width = recipe.n_embd // recipe.n_head * recipe.n_head_kv
    found = [Tensor("token_embd.weight", (recipe.n_vocab, recipe.n_embd), SIGMA)]
    for i in range(recipe.n_layer):
        found += _layer(recipe, f"blk.{i}", kv_width)
    found.append(Tensor("output_norm.weight", (recipe.n_embd,), 0.0))
    found.append(Tensor("output.weight", (recipe.n_vocab, recipe.n_embd), SIGMA))
    return tuple(found)


def size(recipe: SyntheticModel) -> int:
    """Return the bytes of tensor data in the F16 file, to say how large it is before it is made or sent."""
    return sum(tensor.nbytes for tensor in tensors(recipe))


def write(recipe: SyntheticModel, out: Path) -> None:
    """Write the recipe's F16 GGUF to `out`, whole or not at all.

    Raises:
        SpecError: if the recipe cannot be made.
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
        _write(gguf.GGUFWriter(partial, recipe.arch), recipe)
        partial.replace(out)
        _sync_folder(out.parent)
    except OSError as error:
        raise RemoteError(
            f"could not write the synthetic model {out} ({size(recipe) / 1e9:.1f} GB): {error.strerror}",
            next=command("df", "-h", out.parent),
        ) from error
    finally:
        partial.unlink(missing_ok=True)


# -- the recipe -------------------------------------------------------------------------------------------------------


def _check_heads(recipe: SyntheticModel) -> None:
    if recipe.n_embd % recipe.n_head or (recipe.n_embd // recipe.n_head) % 2:
        raise SpecError(f"n_embd {recipe.n_embd} does not give {recipe.n_head} heads (n_head) of an even width")
    if recipe.n_head % recipe.n_head_kv:
        raise SpecError(f"n_head {recipe.n_head} is no multiple of n_head_kv {recipe.n_head_kv}")


def _check_rows(recipe: SyntheticModel) -> None:
    """A row that is no whole number of blocks makes llama-quantize abort, or fall back to another type in silence."""
    block = next((length for pattern, length in BLOCKS if pattern.fullmatch(recipe.quant.upper())), 1)
    for name in ("n_embd", "n_ff"):
        if getattr(recipe, name) % block:
            raise SpecError(
                f"{name} {getattr(recipe, name)} is no multiple of {block}, the block length of {recipe.quant}",
                next=f"set {name}: {math.ceil(getattr(recipe, name) / block) * block}",
            )


def _layer(recipe: SyntheticModel, prefix: str, kv_width: int) -> list[Tensor]:
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
    return [Tensor(f"{prefix}.{name}.weight", shape, sigma) for name, shape, sigma in parts]


# -- the file ---------------------------------------------------------------------------------------------------------


def _write(writer: gguf.GGUFWriter, recipe: SyntheticModel) -> None:
    """Write header and tensors. The writer lays out the file; the weights go past it, a chunk at a time."""
    import numpy as np

    wanted = tensors(recipe)
    _add_metadata(writer, recipe)
    for tensor in wanted:
        kind = np.dtype(np.float16 if tensor.sigma else np.float32)
        writer.add_tensor_info(tensor.name, tensor.shape, kind, tensor.nbytes)
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
        _sync(out)
    finally:
        _close(writer)


def _add_metadata(writer: gguf.GGUFWriter, recipe: SyntheticModel) -> None:
    import gguf

    head = recipe.n_embd // recipe.n_head
    writer.add_name("dgxlab synthetic")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_vocab_size(recipe.n_vocab)
    writer.add_context_length(recipe.n_ctx_train)
    writer.add_embedding_length(recipe.n_embd)
    writer.add_block_count(recipe.n_layer)
    writer.add_feed_forward_length(recipe.n_ff)
    writer.add_head_count(recipe.n_head)
    writer.add_head_count_kv(recipe.n_head_kv)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    # the count of dummy tokens comes from <arch>.vocab_size; no tokenizer means no token ever has a text
    writer.add_tokenizer_model("no_vocab")


def _chunks(tensor: Tensor, seed: int) -> Iterator[Any]:
    """Yield the tensor's little-endian values, at most CHUNK of them at a time."""
    import numpy as np

    if not tensor.sigma:
        yield np.ones(tensor.size, dtype="<f4")
        return
    name = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()
    stream = np.random.PCG64(int.from_bytes(name, "big"))
    table = np.array([z * tensor.sigma for z in _quantiles()], dtype="<f2")
    for start in range(0, tensor.size, CHUNK):
        count = min(CHUNK, tensor.size - start)
        # four weights from each 64-bit word; CHUNK is a multiple of four, so chunking does not change the stream
        words = stream.random_raw(math.ceil(count / 4)).astype("<u8", copy=False)
        yield table[words.view("<u2")[:count]]


_cache: list[float] = []


def _quantiles() -> list[float]:
    """Return the 65,536 midpoint quantiles of the standard normal: one for each value of 16 random bits."""
    if not _cache:
        half = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(32768, 65536)]
        _cache.extend([-z for z in reversed(half)] + half)
    return _cache


def _sync(out: BinaryIO | Any) -> None:
    out.flush()
    os.fsync(out.fileno())


def _sync_folder(folder: Path) -> None:
    """Make the rename itself survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _close(writer: gguf.GGUFWriter) -> None:
    """Close what the writer opened; nothing when it could not open anything."""
    for out in writer.fout or []:
        out.close()
