"""Headers of GGUF files against the gguf package, and files that are cut or lie."""

import struct
from dataclasses import replace
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


def test_a_token_reads_the_experts_that_it_uses_and_the_output_but_no_embedding(file: Path) -> None:
    header = gguf_header.read(file)
    sizes = {tensor.name: tensor.nbytes for tensor in header.tensors}
    unused = sum(size for name, size in sizes.items() if "_exps." in name) * 6 // 8
    assert header.per_token == sum(sizes.values()) - unused - sizes["token_embd.weight"]
    tied = replace(header, tensors=tuple(tensor for tensor in header.tensors if tensor.name != "output.weight"))
    assert tied.per_token == sum(sizes.values()) - unused - sizes["output.weight"]


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
    with pytest.raises(SpecError, match=r"output\.weight ends at"):
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
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 32, 2, 1 << 40), "tensor t begins at byte"),
        (struct.pack("<4sIQQQ1sIQIQ", b"GGUF", 3, 1, 0, 1, b"t", 1, 1 << 40, 2, 0), "tensor t ends at byte"),
        (struct.pack("<4sIQQQ1sIQQIQ", b"GGUF", 3, 1, 0, 1, b"t", 2, 32, 0, 2, 0), "not whole blocks of Q4_0"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, what: bytes, words: str) -> None:
    (tmp_path / "m.gguf").write_bytes(what)
    with pytest.raises(SpecError, match=words):
        gguf_header.read(tmp_path / "m.gguf")


def test_a_tensor_of_another_type_than_its_bytes_is_refused(file: Path) -> None:
    """F16 called Q4_0: the next tensor would begin earlier."""
    content, name = file.read_bytes(), b"token_embd.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8
    assert struct.unpack_from("<I", content, place) == (1,)
    file.write_bytes(content[:place] + struct.pack("<I", 2) + content[place + 4 :])
    with pytest.raises(SpecError, match="tensors before it end"):
        gguf_header.read(file)


def test_bits_count_the_scales(file: Path) -> None:
    header = gguf_header.read(file)
    assert 16 < header.bits < 16.5  # norms, routers and convolutions are F32
    assert header.begin + header.tensors[-1].offset + header.tensors[-1].nbytes == file.stat().st_size
