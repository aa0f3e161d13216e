"""Models that the real llama-quantize makes from a file: their types, and their distance from the source."""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from dgxlab import audit, gguf_header, quantise, synth
from dgxlab.agent import child, models
from dgxlab.agent.environment import Root
from dgxlab.agent.measure import Launched
from dgxlab.errors import RemoteError, SpecError
from dgxlab.gguf_header import BLOCKS
from dgxlab.model import DerivedModel, FileModel, ModelStep, ParityGate, SyntheticModel, model_id
from dgxlab.model.events import ModelEvent
from dgxlab.quantise.fidelity import DECODED, weights
from dgxlab.spec import load
from dgxlab.tools.llama_bench import LlamaBench
from tests.conftest import PROJECT, Bench
from tests.quantise.test_blocks import blocks_of

pytestmark = pytest.mark.llama

MOE = SyntheticModel(arch="qwen35moe", n_layer=4, n_embd=256, n_ff=512, n_head_kv=2, n_vocab=300, quant="F16")
DENSE = SyntheticModel(n_embd=256, n_ff=512, n_vocab=300, quant="F16")
NARROW = replace(DENSE, n_embd=96, n_ff=160, n_head=3, n_head_kv=1)
"""Its rows are no whole blocks of 256 weights."""

Make = Callable[[SyntheticModel, DerivedModel], ModelEvent]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[SyntheticModel, bytes]:
    contents = {}
    for recipe in (MOE, DENSE, NARROW):
        file = tmp_path_factory.mktemp("source") / "f16.gguf"
        synth.write(recipe, file)
        contents[recipe] = file.read_bytes()
    return contents


@pytest.fixture
def derive(llama_bin: Path, tmp_path: Path, sources: dict[SyntheticModel, bytes]) -> Make:
    """Return what lays a recipe's file down, if none is there, and makes a model from the file."""
    root = Root(tmp_path / "root")
    root.create()

    def launch(name: str, argv: Sequence[str]) -> Launched:
        out, err = tmp_path / f"{name}.out", tmp_path / f"{name}.err"
        argv = [word.replace("{bin}", str(llama_bin)) for word in argv]
        return Launched(child.run(argv, env={}, stdout=out, stderr=err, limit_s=120), out, err)

    def make(recipe: SyntheticModel, how: DerivedModel) -> ModelEvent:
        file = tmp_path / "f16.gguf"
        if not file.exists():
            file.write_bytes(sources[recipe])
        how = replace(how, source=FileModel(str(file)))
        step = ModelStep("model-m", "arm", "m", "", how, (), quantise.argv(how), of="f")
        source, files = models.find(root, ModelStep("f", "arm", "f", str(file))), models.files(root, step)
        return models.make(root, step, model_id(how, files), launch, source=source, files=files)

    return make


ANY = FileModel("")


@pytest.mark.parametrize(
    ("recipe", "quant", "bits", "decibels"),
    [
        (DENSE, "Q4_0", 4.5, 20),
        (DENSE, "Q4_K", 4.5, 22),
        (DENSE, "IQ4_XS", 4.25, 21),
        (DENSE, "Q8_0", 8.5, 45),
        (MOE, "MXFP4_MOE", 4.25, 17),
        (MOE, "NVFP4", 4.5, 19),
    ],
)
def test_a_file_is_quantised(derive: Make, recipe: SyntheticModel, quant: str, bits: float, decibels: float) -> None:
    event = derive(recipe, DerivedModel(ANY, quant, pure=True))
    header, contents = gguf_header.read(Path(event.path)), event.contents
    assert contents
    assert contents["parameters"] == sum(tensor.size for tensor in synth.tensors(recipe))
    assert (contents["architecture"], contents["requantised"]) == (recipe.arch, False)
    assert contents["bits"] == pytest.approx(8 * sum(tensor.nbytes for tensor in header.tensors) / header.parameters)
    near = contents["fidelity"]["experts" if recipe is MOE else "ffn"]
    kind = "MXFP4" if quant == "MXFP4_MOE" else quant
    assert near["types"] == kind
    assert 8 * BLOCKS[kind][1] / BLOCKS[kind][0] == bits
    assert near["sqnr_db"] == pytest.approx(decibels, abs=2)
    assert near["nmse"] == pytest.approx(10 ** (-(near["sqnr_db"] or 0) / 10))
    types = {tensor.name: tensor.type for tensor in header.tensors}
    if quant == "NVFP4":
        assert {types[f"blk.0.ssm_{name}.weight"] for name in ("alpha", "beta")} == {"F16"}
        assert types["blk.0.ssm_out.weight"] == "NVFP4"
    assert derive(recipe, DerivedModel(ANY, quant, pure=True)).reused


def decoded(llama_bin: Path, kind: str, content: bytes, count: int) -> np.ndarray:
    """Return so many weights as llama.cpp's own library converts them."""
    name = kind if kind.endswith("_K") else kind.lower()
    convert = getattr(ctypes.CDLL(str(llama_bin / "libggml-base.so.0")), f"dequantize_row_{name[0].lower()}{name[1:]}")
    convert.argtypes, convert.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64], None
    out = np.full(count, np.nan, np.float32)
    convert(content, out.ctypes.data, count)
    return out


def test_the_sample_is_near_all_weights(derive: Make, llama_bin: Path, tmp_path: Path) -> None:
    event = derive(DENSE, DerivedModel(ANY, "Q4_K", pure=True))
    files = [(path, gguf_header.read(path), path.read_bytes()) for path in (tmp_path / "f16.gguf", Path(event.path))]
    noise = signal = 0.0
    for name in (tensor.name for tensor in files[0][1].tensors if ".ffn_" in tensor.name):
        pair = [next(tensor for tensor in header.tensors if tensor.name == name) for _, header, _ in files]
        if pair[1].type == "Q4_K":
            old, new = (
                content[header.begin + tensor.offset :][: tensor.nbytes]
                for (_, header, content), tensor in zip(files, pair, strict=True)
            )
            was = np.frombuffer(old, "<f2").astype(float)
            noise += float(((decoded(llama_bin, "Q4_K", new, was.size) - was) ** 2).sum())
            signal += float((was**2).sum())
    assert event.contents
    sampled = event.contents["fidelity"]["ffn"]
    assert 0 < sampled["sampled"] < sampled["weights"]
    assert sampled["sqnr_db"] == pytest.approx(-10 * math.log10(noise / signal), abs=0.1)


@pytest.mark.parametrize("kind", sorted(set(DECODED) - {"F32", "F16", "BF16"}))
def test_blocks_are_decoded_as_llama_cpp_does(kind: str, llama_bin: Path) -> None:
    content = blocks_of(kind, 40)
    out = decoded(llama_bin, kind, content, 40 * BLOCKS[kind][0])
    finite = np.isfinite(out)
    assert finite.mean() > 0.9
    np.testing.assert_allclose(np.array(weights(kind, content))[finite], out[finite], rtol=1e-5, atol=1e-6)


def test_what_is_quantised_twice_is_asked_for_and_marked(derive: Make, tmp_path: Path) -> None:
    quantised = derive(DENSE, DerivedModel(ANY, "Q8_0"))
    (tmp_path / "f16.gguf").write_bytes(Path(quantised.path).read_bytes())
    with pytest.raises(SpecError, match="quantised already, in Q8_0"):
        derive(DENSE, DerivedModel(ANY, "Q4_0"))
    again = derive(DENSE, DerivedModel(ANY, "Q4_0", allow_requantize=True))
    assert (again.contents or {"requantised": None})["requantised"] is True
    exact = derive(DENSE, DerivedModel(ANY, "F32")).contents
    assert exact
    assert exact["requantised"] is False
    assert {(each["nmse"], each["sqnr_db"]) for each in exact["fidelity"].values()} == {(0.0, None)}


def test_rows_that_are_no_whole_blocks(derive: Make) -> None:
    """llama-quantize takes another type for them, in silence."""
    with pytest.raises(RemoteError, match="no multiple of 256"):
        derive(NARROW, DerivedModel(ANY, "Q4_K_M"))


def test_an_importance_matrix(derive: Make, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "imatrix.gguf", "")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["none"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 512)
    for tensor in synth.tensors(DENSE):
        if tensor.is_matrix:
            writer.add_tensor(f"{tensor.name}.in_sum2", np.ones((1, tensor.shape[-1]), np.float32))
            writer.add_tensor(f"{tensor.name}.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    event = derive(DENSE, DerivedModel(ANY, "IQ3_XXS", pure=True, imatrix=str(tmp_path / "imatrix.gguf")))
    assert event.contents
    assert event.contents["type"] == "IQ3_XXS"
    assert set(event.contents["files"]) == {str(tmp_path / "f16.gguf"), str(tmp_path / "imatrix.gguf")}
    # no decoder: said, not guessed
    assert event.contents["fidelity"]["ffn"] == {
        "types": "IQ3_XXS",
        "weights": 2 * 3 * 256 * 512,
        "sampled": 0,
        "nmse": None,
        "sqnr_db": None,
    }


@pytest.mark.usefixtures("llama_bin")
def test_a_job_makes_measures_and_records_them(make_bench: Callable[[], Bench], tmp_path: Path) -> None:
    """From a recipe, from what was made of it, and from a file; all of it holds in the record and in reports."""
    bench, file = make_bench(), FileModel(str(tmp_path / "f16.gguf"))
    base = replace(DENSE, n_layer=1, n_vocab=320)
    synth.write(base, Path(file.path))
    low = DerivedModel(base, "Q4_K_M")
    names = {"base": base, "low": low, "exact": DerivedModel(low, "F32")}
    names |= {"file": file, "of_file": DerivedModel(file, "Q4_0")}
    entries = tuple(LlamaBench(model=name, n_prompt=(16,)) for name in ("low", "exact", "of_file"))
    experiment = load(PROJECT / "experiments" / "cpu" / "quickstart.yaml")
    small = replace(experiment, models=names, gates=(ParityGate("SQR", "CPU"),), bench=entries)
    outcome, events = bench.run(small)
    assert outcome.error is None
    by_name = {event["name"]: event for event in events if event["event"] == "model"}
    assert [by_name[name]["contents"]["type"] for name in ("file", "of_file")] == ["F16", "Q4_0"]
    assert by_name["exact"]["contents"]["fidelity"]["ffn"]["nmse"] < 1e-12
    _, events = bench.run(small)  # known by the content of the file
    assert "run" not in {event["event"] for event in events}
    assert audit.check(bench.lab.store) == []
    rows = bench.lab.store.rows("SELECT architecture, type, parameters FROM models WHERE model_id LIKE 'derived-%'")
    assert rows == [{"architecture": "llama", "type": "Q4_0", "parameters": by_name["base"]["contents"]["parameters"]}]
