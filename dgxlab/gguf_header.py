"""The header of a GGUF file: the model's metadata and the actual types of its tensors.

Read with the standard library only, because hosts may lack the gguf package. The format is that of ggml's docs/gguf.md,
version 2 and 3, little-endian: magic, counts, key-value pairs, then name, shape, type and offset of every tensor.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Union

from dgxlab.errors import SpecError, command

Value = Union[int, float, bool, str, tuple[int, int]]
"""One value of the metadata; of an array only the type number of its items and its length are kept."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letter of each type of value that has a fixed size."""
_STRING, _ARRAY = 8, 9

TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""ggml's types by number: name, weights in a block, bytes of a block (ggml.h and ggml-common.h at the pin)."""

BLOCKS: Mapping[str, tuple[int, int]] = {name: (block, size) for name, block, size in TYPES.values()}
"""Weights in a block of each type, and the block's bytes."""

_LONGEST = 1 << 28
"""Limit for the bytes of a string and the counts of tensors and keys; a larger value means a damaged file."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    shape: tuple[int, ...]  # as in ggml: the length of a row comes first
    type: str  # ggml's name, as Q4_K
    offset: int  # its first byte, counted from `Header.begin`
    nbytes: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """A file's metadata and tensors."""

    metadata: Mapping[str, Value]
    tensors: tuple[TensorInfo, ...]
    begin: int  # the byte of the file at which the tensors' data begins

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, "" where the file has none."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def parameters(self) -> int:
        """Number of weights of all tensors."""
        return sum(tensor.size for tensor in self.tensors)

    @property
    def bits(self) -> float:
        """Mean bits per weight, scales included; 0 without tensors."""
        return 8 * sum(tensor.nbytes for tensor in self.tensors) / max(1, self.parameters)

    @property
    def per_token(self) -> int:
        """Bytes of weights that are read to generate one token.

        Of experts only the share that is used counts. The token embedding does not count, because one row of it is
        read, unless it is also the output matrix.
        """
        used, experts = (self.metadata.get(f"{self.architecture}.expert_{key}") for key in ("used_count", "count"))
        share = used / experts if isinstance(used, int) and isinstance(experts, int) and experts else 1.0
        tied = all(tensor.name != "output.weight" for tensor in self.tensors)
        read = [tensor for tensor in self.tensors if tied or tensor.name != "token_embd.weight"]
        return round(sum(tensor.nbytes * (share if "_exps." in tensor.name else 1.0) for tensor in read))

    @property
    def type(self) -> str:
        """The type of most weights, by ggml's name; "" without tensors."""
        counts: Counter[str] = Counter()
        for tensor in self.tensors:
            counts[tensor.type] += tensor.size
        return counts.most_common(1)[0][0] if counts else ""


class _Reader:
    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream

    def take(self, letter: str) -> Union[int, float, bool]:
        layout = struct.Struct(f"<{letter}")
        (value,) = layout.unpack(self.read(layout.size))
        assert isinstance(value, (int, float))
        return value

    def count(self, letter: str = "Q") -> int:
        value = int(self.take(letter))
        if value > _LONGEST:
            raise ValueError(f"a count of {value}")
        return value

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        if len(data) != size:
            raise ValueError("the file ends in its header")
        return data

    def text(self) -> str:
        return self.read(self.count()).decode(errors="replace")

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            inner, length = self.count("I"), self.count()
            if inner in _SCALARS:
                self.read(struct.calcsize(f"<{_SCALARS[inner]}") * length)
            else:
                for _ in range(length):
                    self.value(inner)
            return inner, length
        if kind not in _SCALARS:
            raise ValueError(f"a value of type {kind}")
        return self.take(_SCALARS[kind])

    def tensor(self) -> TensorInfo:
        name = self.text()
        shape = tuple(int(self.take("Q")) for _ in range(self.count("I")))
        number, offset = self.count("I"), int(self.take("Q"))
        if number not in TYPES:
            raise ValueError(f"tensor {name} of type {number}")
        kind, block, size = TYPES[number]
        if not 1 <= len(shape) <= 4 or min(shape) < 1 or shape[0] % block:
            raise ValueError(f"tensor {name} of shape {shape}, whose rows are not whole blocks of {kind}")
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // block * size)


def read(path: Path) -> Header:
    """Return the header of a GGUF file.

    Raises SpecError if it is not GGUF, ends early, or has tensors that overlap, leave gaps, or end beyond the file.
    """
    try:
        with path.open("rb") as stream:
            return _read(_Reader(stream), path.stat().st_size)
    except (ValueError, struct.error) as error:
        raise SpecError(f"{path} is no whole GGUF file: {error}", next=command("ls", "-l", path)) from error


def _read(reader: _Reader, size: int) -> Header:
    if reader.read(4) != b"GGUF" or reader.take("I") not in (2, 3):
        raise ValueError("it does not begin as GGUF of version 2 or 3 does")
    tensors, keys = reader.count(), reader.count()
    metadata = {reader.text(): reader.value(reader.count("I")) for _ in range(keys)}
    infos = tuple(reader.tensor() for _ in range(tensors))
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align < 1:
        raise ValueError(f"an alignment of {align}")
    begin = -(-reader.stream.tell() // align) * align
    end = 0
    for info in infos:
        if info.offset != end:  # the one before it, or this one, is not of the type that the header says
            raise ValueError(
                f"tensor {info.name} begins at byte {info.offset:,}, and the tensors before it end at {end:,}"
            )
        if begin + info.offset + info.nbytes > size:
            raise ValueError(f"tensor {info.name} ends at byte {begin + info.offset + info.nbytes:,} of {size:,}")
        end = -(-(end + info.nbytes) // align) * align
    return Header(metadata, infos, begin)
