"""Quantisation by the build's own llama-quantize: its command, what it would spoil, and the types that it made.

llama-quantize falls back to other types in silence, so the types in the file are compared with the requested ones.
"""

from __future__ import annotations

import re

from dgxlab.errors import RemoteError, SpecError
from dgxlab.gguf_header import BLOCKS, Header, TensorInfo
from dgxlab.model import DerivedModel, FileModel

FLOATS = ("F32", "F16", "BF16")
"""Types without blocks: a quantised model may be converted to them again; F32 holds its values exactly."""

MXFP4 = "MXFP4_MOE"  # llama-quantize's type of experts in MXFP4, everything else in Q8_0
NVFP4 = "NVFP4"  # a type without a name in llama-quantize: matrices of layers get it, embeddings and output stay F16

DECAY = "ssm_(alpha|beta|ba)"
"""The products that set the decay of a gated delta net: a number or two a head, which no NVFP4 model has in 4 bits."""

_WITH_IMATRIX = re.compile(r"IQ1_.*|IQ2_.*|IQ3_XXS|IQ3_XS|Q2_K_S")
"""Types that llama-quantize makes only with an importance matrix."""

_KEPT = re.compile(
    r"_norm\.weight|ffn_gate_inp\.weight|ssm_conv1d|shortconv\.conv|altup|laurel|per_layer_model_proj|attn_rel_b|rel_pos"
    r"|time_mix_(first|decay_w|lerp|[agvw]\d)|pos(ition)?_embd|token_types|sam\.|patch_(embd|merger)"
)
"""Matrices that llama-quantize leaves in their type."""


def is_quantised(kind: str) -> bool:
    """Return whether a ggml type has blocks of weights that share a scale."""
    return BLOCKS[kind][0] > 1


def check_source(how: DerivedModel, source: Header | None) -> None:
    """Raise a SpecError if llama-quantize cannot make a derived model, or would silently make a bad one.

    `source` is the header of the file that it is made from; None where only the spec is known.
    """
    if _WITH_IMATRIX.fullmatch(how.quant) and not how.imatrix:
        text = f"{how.quant} needs an importance matrix, and no imatrix is given"
        raise SpecError(text, next="set imatrix to a file of llama-imatrix, or choose another quant, as IQ4_XS")
    if source:
        quantised = any(is_quantised(tensor.type) for tensor in source.tensors)
        kind = source.type
    else:
        quantised = not isinstance(how.source, FileModel) and how.source.quant not in FLOATS
        kind = "" if isinstance(how.source, FileModel) else how.source.quant
    if quantised and how.quant not in FLOATS and not how.allow_requantize:
        text = f"the source is quantised already, in {kind}: {how.quant} made from it is worse than from the original"
        raise SpecError(text, next="derive it from an F16 model, or set allow_requantize: true, which marks it")
    if source and how.quant == MXFP4 and not any("_exps." in tensor.name for tensor in source.tensors):
        # llama-quantize gives Q8_0 throughout, and the file's name says MXFP4
        raise SpecError(f"{MXFP4} is for experts, and the source has none", next="set quant: NVFP4")


def argv(how: DerivedModel) -> tuple[str, ...]:
    """Return llama-quantize's command line, with the placeholders {bin}, {in}, {out} and {imatrix} for paths."""
    words = ["{bin}/llama-quantize"]
    if how.pure and how.quant not in (NVFP4, MXFP4):  # --pure would convert what they leave to types without kernels
        words.append("--pure")
    if how.allow_requantize or how.quant in FLOATS:
        words.append("--allow-requantize")
    if how.imatrix:
        words += ["--imatrix", "{imatrix}"]
    if how.quant != NVFP4:
        return (*words, "{in}", "{out}", how.quant)
    # the first pattern that fits counts
    words += ["--tensor-type", f"{DECAY}=f16", "--tensor-type", "blk=nvfp4"]
    # a type by tensor's name counts only where the file's own type is quantised; nothing is left that gets Q8_0
    words += ["--output-tensor-type", "f16", "--token-embedding-type", "f16"]
    return (*words, "{in}", "{out}", "Q8_0")


def check_types(how: DerivedModel, source: Header, result: Header) -> None:
    """Raise a RemoteError unless the tensors of a derived model's file have the requested types.

    `source` is the header of the file that it was made from, `result` that of its own.
    """
    kinds = {tensor.name: tensor.type for tensor in result.tensors}
    for tensor in source.tensors:
        wanted, actual = _wanted(how, tensor), kinds.get(tensor.name, "missing")
        if wanted not in ("", actual):
            raise _other(how, f"{tensor.name} is {actual}, not {wanted}")
    if how.quant not in (NVFP4, MXFP4) and (base := _base_of(how.quant)):
        length, _ = BLOCKS[base]
        for tensor in source.tensors:
            if _is_matrix(tensor) and tensor.shape[0] % length:
                raise _other(how, f"{tensor.name} is {kinds[tensor.name]}, as its rows are no multiple of {length}")
        layers = [tensor for tensor in result.tensors if tensor.name.startswith("blk.")]
        if (most := Header({}, tuple(filter(_is_matrix, layers)), 0).type) not in ("", base):
            raise _other(how, f"most weights of its layers are {most}")


def _other(how: DerivedModel, cause: str) -> RemoteError:
    message = f"llama-quantize did not make {how.quant}: {cause}"
    return RemoteError(message, next="choose another quant, or widths that are multiples of its block")


def _wanted(how: DerivedModel, tensor: TensorInfo) -> str:
    """Return the type that a tensor must have, "" where llama-quantize chooses one for a mixture."""
    if not _is_matrix(tensor):
        return tensor.type
    if how.quant == NVFP4:
        return NVFP4 if tensor.name.startswith("blk.") and not re.search(DECAY, tensor.name) else "F16"
    if how.quant == MXFP4:
        return "MXFP4" if "_exps." in tensor.name else "Q8_0"
    return _base_of(how.quant) if how.pure or how.quant in FLOATS else ""


def _base_of(quant: str) -> str:
    """Return ggml's type of most weights of a mixture: Q4_K for Q4_K_M; "" where the name does not say."""
    base = re.sub(r"(Q\d_K)_[SML]$", r"\1", quant)
    return base if base in BLOCKS else ""


def _is_matrix(tensor: TensorInfo) -> bool:
    rows = tensor.size // tensor.shape[0]
    return rows > 1 and tensor.name.endswith("weight") and not _KEPT.search(tensor.name)
