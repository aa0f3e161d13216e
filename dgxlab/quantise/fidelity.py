"""The error of quantised weights against those that they were made from, by class of tensors.

NMSE is the sum of squared errors by the sum of squared weights of the source; SQNR is the same in dB. Both are
measured on runs of weights spread evenly over each tensor, the same for every host: a whole model would take hours.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import BinaryIO

from dgxlab.gguf_header import BLOCKS, Header, TensorInfo
from dgxlab.model.parts import Fidelity
from dgxlab.quantise.blocks import DECODED, weights

RUN = 256
"""Weights in a sampled run: a whole number of blocks of every type."""

RUNS = 32
"""Most runs that are read of a tensor: 8,192 weights, in about a hundredth of a second."""

_CLASSES = (
    (r"token_embd", "embedding"),
    (r"^output", "output"),
    (r"_exps\.", "experts"),
    (r"\.ssm_", "ssm"),
    (r"\.attn_", "attention"),
    (r"\.ffn_", "ffn"),
)
"""Classes by a tensor's name; first match. A shared expert is a ffn: every token passes it."""


def fidelity(source: Path, before: Header, result: Path, after: Header) -> dict[str, Fidelity]:
    """Return NMSE and SQNR by class of tensors; tensors whose type did not change are left out.

    Args:
        source: The file that the model was made from, and `before`, its header.
        result: The quantised file, and `after`, its header.
    """
    originals = {tensor.name: tensor for tensor in before.tensors}
    # a gated delta net projects into q, k, v and its gate by tensors that are named as an attention's
    nets = {tensor.name.partition(".ssm_")[0] for tensor in after.tensors if ".ssm_" in tensor.name}
    classes: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    for tensor in after.tensors:
        if tensor.type != originals[tensor.name].type:
            layer, _, name = tensor.name.rpartition(".attn_")
            part_of_net = layer in nets and name.startswith(("qkv", "gate"))
            classes["ssm" if part_of_net else class_of(tensor.name)].append(tensor)
    with source.open("rb") as old, result.open("rb") as new:
        by_class = {}
        for name, tensors in sorted(classes.items()):
            pairs = [(originals[tensor.name], tensor) for tensor in tensors]
            by_class[name] = _of_class(pairs, (old, before.begin), (new, after.begin))
        return by_class


def class_of(name: str) -> str:
    """Return the class of a tensor by its name: attention, ffn, experts, ssm, embedding, output or other."""
    return next((kind for pattern, kind in _CLASSES if re.search(pattern, name)), "other")


def _of_class(
    pairs: list[tuple[TensorInfo, TensorInfo]], old: tuple[BinaryIO, int], new: tuple[BinaryIO, int]
) -> Fidelity:
    types = Counter(tensor.type for _, tensor in pairs)
    sampled, noise, signal = 0, 0.0, 0.0
    known = {each.type for pair in pairs for each in pair} <= DECODED.keys()
    for original, tensor in pairs if known else ():
        spots = sampled_runs(tensor.size)
        read = sum(count for _, count in spots)
        share = read / tensor.size  # a large tensor counts for more than a small one
        for start, count in spots:
            was, now = (_read(*file, each, start, count) for file, each in ((old, original), (new, tensor)))
            noise += math.fsum((a - b) ** 2 for a, b in zip(was, now, strict=True)) / share
            signal += math.fsum(a * a for a in was) / share
        sampled += read
    nmse = noise / signal if signal and math.isfinite(noise / signal) else None
    return {
        "types": ", ".join(kind for kind, _ in types.most_common()),
        "weights": sum(tensor.size for _, tensor in pairs),
        "sampled": sampled,
        "nmse": nmse,
        "sqnr_db": -10 * math.log10(nmse) if nmse else None,  # none where every weight is exact
    }


def sampled_runs(size: int) -> list[tuple[int, int]]:
    """Return (first weight, length) of each run that is read of a tensor of `size` weights."""
    runs = size // RUN
    if runs <= RUNS:
        return [(start, min(RUN, size - start)) for start in range(0, size, RUN)]
    return [(i * runs // RUNS * RUN, RUN) for i in range(RUNS)]


def _read(stream: BinaryIO, begin: int, tensor: TensorInfo, start: int, count: int) -> list[float]:
    length, size = BLOCKS[tensor.type]
    stream.seek(begin + tensor.offset + start // length * size)
    return weights(tensor.type, stream.read(count // length * size))
