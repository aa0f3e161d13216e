"""What a spec becomes: records, defaults, identities, the project folder; and the specs that are shipped."""

import json
import time
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import Session, SyntheticModel
from dgxlab.project import MARKER
from dgxlab.spec import json_schema, load, load_all
from dgxlab.tools import BackendOpsBench, BatchedBench, LlamaBench
from tests.conftest import OCTOBER
from tests.spec.specs import BASE, PIN, read, write

PROJECT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((PROJECT / "experiments").rglob("*.yaml"))


def test_every_record() -> None:
    base = load(write(BASE, "base.yaml"))
    assert base.name == "base"
    assert base.sources == ("https://github.com/ggml-org/llama.cpp", "pypi:llama-cpp-python==0.3.30")
    assert base.cmake == {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "121"}
    assert base.models["small"] == SyntheticModel(n_layer=2, seed=7)
    assert base.session == Session(cycles=6)
    assert base.bench == (
        BackendOpsBench("MUL_MAT", "CPU", {"type_a": ("q4_0", "q4_K"), "m": (4096,), "n": (1, 8, 512)}),
        LlamaBench("q4k", (512, 2048), (128,), {"n_ubatch": (512, 2048)}),
        BatchedBench("small", (128,), (64,), (1, 8), {"flash_attn": (-1,)}),
    )


def test_the_smallest_spec() -> None:
    spec = f"llama_cpp: {{pin: {PIN}}}\nbench: [backend-ops: {{op: ADD, backend: CPU, where: {{m: 1}}}}]\n"
    smallest = load(write(spec, "tiny.yaml"))
    assert (smallest.name, smallest.host, smallest.hypothesis) == ("tiny", "local", "")
    assert (smallest.series, smallest.cmake, smallest.env, smallest.models, smallest.gates) == ((), {}, {}, {}, ())
    assert smallest.session == Session()


@pytest.mark.parametrize(
    ("text", "value"),
    {
        "true": "ON",
        "false": "OFF",
        "121": "121",
        "-1": "-1",
        "Release": "Release",
        '"90;121"': "90;121",
        '"on"': "on",
        '"9.0"': "9.0",
        '""': "",
    }.items(),
)
def test_cmake_values(text: str, value: str) -> None:
    assert read(f"cmake: {{X: {text}}}\n").cmake["X"] == value


@pytest.mark.parametrize(
    ("text", "values"),
    {"auto": [-1], "true": [1], "false": [0], '["on", "off", "auto"]': [1, 0, -1], "[1, 0, -1]": [1, 0, -1]}.items(),
)
def test_flash_attn_is_what_llama_bench_prints(text: str, values: list[int]) -> None:
    entry = read(f"bench: [llama-bench: {{model: q4k, n_gen: 1, flash_attn: {text}}}]\n").bench[0]
    assert isinstance(entry, LlamaBench)
    assert entry.axes == {"flash_attn": tuple(values)}
    assert all(type(value) is int for value in entry.axes["flash_attn"])
    text = "bench: [llama-bench: {model: q4k, n_gen: 1, flash_attn: [true, false], exclude: [{flash_attn: 'off'}]}]\n"
    assert read(text).bench[0].exclude == ({"flash_attn": 0},)


def test_every_axis() -> None:
    axes = (
        "n_depth: [0, 4096], n_batch: 1, n_ubatch: 2, type_k: q8_0, type_v: f16, n_threads: 3, n_gpu_layers: [-1, 99], "
        "n_cpu_moe: 0, split_mode: [layer, row], main_gpu: 0, no_kv_offload: [true, false], flash_attn: auto, "
        'use_mmap: false, embeddings: false, cpu_mask: "0xff", cpu_strict: true, poll: [0, 50]'
    )
    entry = read(f"bench: [llama-bench: {{model: q4k, n_gen: 1, {axes}}}]\n").bench[0]
    assert isinstance(entry, LlamaBench)
    assert set(entry.axes) == {part.split(":")[0] for part in axes.replace("[", "").split(", ") if ":" in part}
    assert entry.axes["no_kv_offload"] == (True, False)
    assert entry.axes["cpu_mask"] == ("0xff",)


def test_a_scalar_is_a_list_of_one() -> None:
    """Wherever a list of scalars is meant; whole numbers among raw arguments become their digits."""
    child = read("series: w4a16\nllama_cpp: {sources: /src}\ngates: [engaged: {stderr: 'x', tools: llama-bench}]\n")
    assert (child.series, child.sources, child.gates[1].tools) == (("w4a16",), ("/src",), ("llama-bench",))
    llama = "llama-bench: {model: q4k, n_gen: 1, args"
    entries = f"{llama}: --verbose}}, batched-bench: {{model: q4k, npp: 1, ntg: 2, npl: 3}}, {llama}: [--prio, 2, -v]}}"
    single, batched, several = read(f"bench: [{entries}]\n").bench
    assert single.args == ("--verbose",)
    assert (batched.npp, batched.ntg, batched.npl) == ((1,), (2,), (3,))
    assert several.args == ("--prio", "2", "-v")


def test_sources_are_urls_clones_and_sdists() -> None:
    urls = ("https://github.com/ggml-org/llama.cpp", "git@github.com:ggml-org/llama.cpp.git")
    urls += ("ssh://git@host/llama.cpp", "file:///srv/git/llama.cpp")
    sources = (*urls, "/srv/llama.cpp", "~/src/llama.cpp", "../llama.cpp", "pypi:llama-cpp-python==0.3.30")
    assert read(f"llama_cpp: {{sources: {json.dumps(sources)}}}\n").sources == sources


def test_path_and_root(folder: Path) -> None:
    """Both are absolute; the root is a marked folder above the file or the current one, else one with patches."""
    alone = load(write(BASE, "alone/deep/x.yaml"))
    assert (alone.path, alone.root) == (str(folder / "alone/deep/x.yaml"), str(folder))
    (folder / "lab/patches").mkdir(parents=True)
    inside = load(write(BASE, "lab/experiments/deep/base.yaml"))
    assert inside.root == str(folder / "lab")
    (folder / MARKER).touch()
    assert load(Path("lab/experiments/deep/base.yaml")).root == str(folder)
    (folder / "lab/experiments" / MARKER).touch()
    assert load(Path("lab/experiments/deep/base.yaml")).root == str(folder / "lab/experiments")
    assert load(Path("lab/../lab/experiments/deep/base.yaml")).path == inside.path


def test_identity_is_what_is_asked_for(folder: Path) -> None:
    """The same spec elsewhere, or said through extends, has the same digest; another value another."""
    base = load(write(BASE, "base.yaml"))
    assert load(write(BASE, "elsewhere/y.yaml")).digest == base.digest
    assert load(write("name: base\nextends: base.yaml\n")).digest == base.digest
    assert load(Path("base.yaml"), ["session.cycles=7"]).digest != base.digest


@pytest.mark.parametrize("columns", [100, 10_000])
def test_a_matrix_of_10_000_cells_loads_at_once(columns: int) -> None:
    first, second = list(range(1, columns + 1)), list(range(1, 10_000 // columns + 1))
    write(BASE.replace("npp: 128", f"npp: {first}").replace("npl: [1, 8]", f"npl: {second}"))
    times = []
    for _ in range(3):
        start = time.process_time()
        entry = load(Path("x.yaml")).bench[2]
        times.append(time.process_time() - start)
    assert isinstance(entry, BatchedBench)
    assert len(entry.npp) * len(entry.npl) == 10_000
    assert min(times) < 0.3


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_experiment(path: Path) -> None:
    experiment = load(path)
    assert experiment.name == path.stem
    schema = path.read_text().splitlines()[0].removeprefix("# yaml-language-server: $schema=")
    assert (path.parent / schema).samefile(PROJECT / "schema/experiment.schema.json")
    assert experiment.root == str(PROJECT)
    assert experiment.pin == (OCTOBER if "-oct" in path.stem else PIN)
    assert all((PROJECT / "patches" / name / "series").is_file() for name in experiment.series)
    assert experiment.gates


def test_shipped_experiments_have_names_of_their_own() -> None:
    names = {path.stem for path in SHIPPED}
    assert {"quickstart", "shapes-cpu", "stock", "shapes", "h200"} <= names
    assert len(names) == len(SHIPPED)


def test_the_checked_in_schema_is_this_one() -> None:
    """`dgxlab schema --output schema/experiment.schema.json` brings it up to date."""
    assert (PROJECT / "schema/experiment.schema.json").read_text() == json.dumps(json_schema(), indent=2) + "\n"


def test_the_schema_describes_every_key_and_allows_no_others() -> None:
    schema = json_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "dgxlab experiment"
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        assert part["description"]
        assert all("description" in key or "$ref" in key for key in part["properties"].values())
    assert "required" not in schema
    benches = {"backend-ops", "llama-bench", "batched-bench", "profile", "serve"}
    assert set(schema["$defs"]["BenchSpec"]["properties"]) == benches


def test_a_sweep_is_an_experiment_for_each_combination() -> None:
    write(BASE, "base.yaml")
    text = 'extends: base.yaml\nmatrix: {env: {A: ["1", a b], B: x}, cmake: {C: [true, 90]}}\n'
    made = load_all(write(text, "sweep.yaml"), ["session.cycles=4"], "dgx")
    assert [(each.name, each.env["A"], each.cmake["C"]) for each in made] == [
        ("sweep-1-x-ON", "1", "ON"),
        ("sweep-1-x-90", "1", "90"),
        ("sweep-a_b-x-ON", "a b", "ON"),
        ("sweep-a_b-x-90", "a b", "90"),
    ]
    first = load(Path("base.yaml"), ["session.cycles=4", "env.A='1'", "env.B=x", "cmake.C=true"], "dgx")
    assert made[0].spec == {**first.spec, "name": "sweep-1-x-ON"}
    write("extends: sweep.yaml\nmatrix: {env: {B: [x, z]}}\n", "wider.yaml")
    assert len(load_all(Path("wider.yaml"))) == 8
    assert [each.name for each in load_all(Path("base.yaml"))] == ["base"]


def test_a_sweep_looks_for_the_other_specs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    rglob = Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda self, pattern: looked.append(pattern) or rglob(self, pattern))
    write(BASE, "base.yaml")
    assert len(load_all(write("extends: base.yaml\nmatrix: {env: {A: [x, z]}}\n", "sweep.yaml"))) == 2
    assert looked == ["*.yaml"]


@pytest.mark.parametrize(
    ("matrix", "sentence"),
    [
        ("env: {A: [a b, a/b]}", "matrix: would call two experiments 'sweep-a_b'"),
        (f"env: {{A: {'x' * 60}}}", "give a shorter name"),
        ("env: {A_TOKEN: x}", "env.A_TOKEN: looks like a secret"),
        ("cmake: {A: [%s]}" % ",".join(map(str, range(1001))), "matrix: makes more than 1000 experiments"),  # noqa: UP031
    ],
)
def test_sweeps_that_are_refused(matrix: str, sentence: str) -> None:
    write(BASE, "base.yaml")
    with pytest.raises(SpecError, match=sentence) as refused:
        load_all(write(f"extends: base.yaml\nmatrix: {{{matrix}}}\n", "sweep.yaml"))
    assert "sweep.yaml:2: " in refused.value.message
