"""Headers of GGUF files against the gguf package, and files that are cut or lie."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import pytest

from dgxlab import gguf_header, synth
from dgxlab.errors import SpecError
from dgxlab.model import SyntheticModel


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    synth.write(SyntheticModel(arch="qwen35moe", n_layer=4, n_vocab=40), path)
    return path


def test_it_reads_what_the_gguf_package_reads(file: Path) -> None:
    header, reader = gguf_header.read(file), gguf.GGUFReader(file)
    theirs = [(t.name, t.tensor_type.name, tuple(map(int, t.shape)), t.n_bytes) for t in reader.tensors]
    assert [(t.name, t.type, t.shape, t.nbytes) for t in header.tensors] == theirs
    arrays = {name for name, field in reader.fields.items() if field.types[:1] == [gguf.GGUFValueType.ARRAY]}
    scalars = {name: f.contents() for name, f in reader.fields.items() if not name.startswith("GGUF.")}
    assert {k: v for k, v in header.metadata.items() if k not in arrays} == {
        name: value for name, value in scalars.items() if name not in arrays
    }
    assert header.metadata["qwen35moe.rope.dimension_sections"] == (gguf.GGUFValueType.INT32, 4)
    assert (header.architecture, header.type) == ("qwen35moe", "F16")


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    theirs = {int(kind): (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    differs = {kind for kind, sizes in gguf_header.TYPES.items() if theirs.get(kind, sizes) != sizes}
    assert differs <= {9}  # Q8_1 is never in a file, and the package has its old size


@pytest.mark.parametrize("length", [0, 3, 4, 20, 200, 2000])
def test_a_file_cut_in_its_header_is_refused(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(SpecError, match="no whole GGUF file"):
        gguf_header.read(file)


def test_a_file_cut_in_its_weights_is_refused(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(SpecError, match=r"output\.weight ends at byte"):
        gguf_header.read(file)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "does not begin as GGUF"),
        (struct.pack("<4sIQQ", b"GGML", 3, 0, 0), "does not begin as GGUF"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 1 << 60, 0), "a count of"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1 << 60), "a count of"),
        (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77), "a value of type 77"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 99, 0), "of type 99"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "not whole blocks of Q4_0"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 2, 1 << 40), "tensor t ends at byte"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, what: bytes, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(what)
    with pytest.raises(SpecError, match=words):
        gguf_header.read(tmp_path / "m.gguf")
