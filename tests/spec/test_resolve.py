"""`extends` and `--set key=value`: what merges, appends and replaces, and whose line an error names."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import EngagedGate, Expectation, FileModel, ParityGate, Session, SyntheticModel
from dgxlab.spec import load
from dgxlab.tools import BatchedBench, LlamaBench
from tests.spec.specs import BASE, PIN, child_refusal, read, refusal, write

MODELS = {"q4k": FileModel("~/models/q4k.gguf")}
SMALL = {"small": SyntheticModel(n_layer=2, seed=7)}
SEED_1 = SyntheticModel(seed=1)


@pytest.mark.parametrize(
    ("child", "field", "value"),
    [
        ("name: child\n", "pin", PIN),
        ("name: child\n", "name", "child"),
        ("name: child\n", "hypothesis", ""),
        ("hypothesis: mine\n", "name", "x"),
        ('env: {B: "2"}\n', "env", {"GGML_CUDA_FORCE_MMQ": "1", "B": "2"}),
        ('env: {GGML_CUDA_FORCE_MMQ: "0"}\n', "env", {"GGML_CUDA_FORCE_MMQ": "0"}),
        ("cmake: {X: true}\n", "cmake", {"GGML_CUDA": "ON", "CMAKE_CUDA_ARCHITECTURES": "121", "X": "ON"}),
        ("session: {thermal: cold}\n", "session", Session(6, "cold")),
        ("session: {effect: 5%}\n", "session", Session(effect=0.05)),
        ("session: {drift_limit: 25%}\n", "session", Session(cycles=6, drift_limit=0.25)),
        ("series: [c]\n", "series", ("c",)),
        ("series: []\n", "series", ()),
        ("llama_cpp: {sources: [/src]}\n", "sources", ("/src",)),
        ("bench: [{llama-bench: {model: q4k, n_gen: 8}}]\n", "bench", (LlamaBench("q4k", (), (8,)),)),
        (
            "models: {small: {synthetic: {n_layer: 3}}}\n",
            "models",
            {**MODELS, "small": SyntheticModel(n_layer=3, seed=7)},
        ),
        (
            "models: {small: {path: /s}, q4k: {synthetic: {seed: 1}}}\n",
            "models",
            {"q4k": SEED_1, "small": FileModel("/s")},
        ),
    ],
)
def test_what_a_child_gets(child: str, field: str, value: object) -> None:
    """Maps and models of one kind merge, lists and models of another kind replace; name and hypothesis are its own."""
    write(BASE + "series: [a, b]\nhypothesis: base wins\n", "base.yaml")
    assert getattr(load(write(f"extends: base.yaml\n{child}")), field) == value


PARITY = ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103), 306)
SAME = "op: MUL_MAT, backend: CPU"


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        ("[]", (PARITY,)),
        ("[engaged: {stderr: 'm:'}]", (PARITY, EngagedGate("m:"))),
        ("[backend-ops: {op: ADD, backend: CPU}]", (PARITY, ParityGate("ADD", "CPU"))),
        ("[backend-ops: {op: MUL_MAT, backend: CUDA0}]", (PARITY, ParityGate("MUL_MAT", "CUDA0"))),
        (f"[backend-ops: {{{SAME}, env: {{A: '1'}}}}]", (PARITY, ParityGate("MUL_MAT", "CPU", env={"A": "1"}))),
        (f"[backend-ops: {{{SAME}, where: {{n: 1}}}}]", (PARITY, ParityGate("MUL_MAT", "CPU", where={"n": (1,)}))),
        (f"[backend-ops: {{{SAME}, expect: 1188/1188}}]", (replace(PARITY, expect=Expectation(1188, 1188)),)),
        (f"[backend-ops: {{{SAME}, env: {{}}, limit_s: 9}}]", (replace(PARITY, limit_s=9.0),)),
        (f"[backend-ops: {{{SAME}, expect: null}}]", (replace(PARITY, expect=None),)),
        ("[backend-ops: {backend: CPU, op: MUL_MAT}]", (PARITY,)),
    ],
)
def test_gates_append_or_refine_and_never_vanish(gates: str, expected: tuple[object, ...]) -> None:
    """Another gate appends; the inherited one stated again keeps its place and what the child does not say."""
    assert read(f"gates: {gates}\n").gates == expected


def test_an_engaged_gate_stated_again_is_the_same_gate() -> None:
    """Marker and tools are its identity; another tool makes another gate, so that none is narrowed."""
    text = "extends: {}.yaml\ngates: [engaged: {{stderr: 'm:', tools: [{}]}}]\n"
    write(BASE, "base.yaml")
    write(text.format("base", "llama-bench, backend-ops"), "middle.yaml")
    same = load(write(text.format("middle", "backend-ops, llama-bench")))
    assert [type(gate) for gate in same.gates] == [ParityGate, EngagedGate]
    narrower = load(write(text.format("middle", "backend-ops")))
    assert narrower.gates[1:] == (
        EngagedGate("m:", ("llama-bench", "backend-ops")),
        EngagedGate("m:", ("backend-ops",)),
    )


@pytest.mark.parametrize(
    ("gates", "message"),
    [
        ("gates:\n", "x.yaml:2: gates: must be a list, not nothing"),
        ("gates: {}\n", "x.yaml:2: gates: must be a list, not an empty map"),
        (
            "gates:\n  - backend-ops: {op: ADD, backend: CPU}\n  - backend-ops: {op: ADD, backend: CPU, expect: 3/3}\n",
            "x.yaml:4: gates[1]: is the same gate as at line 3",
        ),
        (
            "gates:\n  - backend-ops:\n      op: MUL_MAT\n      backend: CPU\n      expect: 12/13\n",
            "x.yaml:6: gates[0].backend-ops.expect: must be all of a positive number of cases",
        ),
    ],
)
def test_gates_that_are_refused(gates: str, message: str) -> None:
    assert child_refusal(gates).message.startswith(message)


def test_extends_is_relative_to_the_file_that_says_it() -> None:
    write(BASE, "a/base.yaml")
    write("extends: ../a/base.yaml\nenv: {MIDDLE: '1'}\n", "b/middle.yaml")
    child = load(write("extends: ../../b/middle.yaml\n", "c/d/child.yaml"))
    assert child.env == {"GGML_CUDA_FORCE_MMQ": "1", "MIDDLE": "1"}


def test_a_chain_may_have_any_length() -> None:
    write(BASE, "s0.yaml")
    for number in range(1, 1500):
        write(f"extends: s{number - 1}.yaml\nenv: {{N: '{number}'}}\n", f"s{number}.yaml")
    assert load(Path("s1499.yaml")).env["N"] == "1499"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a": "a"}, "a.yaml:1: extends: goes round in a circle: a.yaml -> a.yaml"),
        ({"a": "b", "b": "a"}, "b.yaml:1: extends: goes round in a circle: a.yaml -> b.yaml -> a.yaml"),
        ({"a": "b", "b": "c", "c": "b"}, "c.yaml:1: extends: goes round in a circle: b.yaml -> c.yaml -> b.yaml"),
        ({"a": "link"}, "a.yaml:1: extends: goes round in a circle: a.yaml -> link.yaml"),
        ({"a": "d/../a"}, "a.yaml:1: extends: goes round in a circle: a.yaml -> a.yaml"),
    ],
)
def test_a_circle_is_named(files: dict[str, str], message: str) -> None:
    Path("link.yaml").symlink_to("a.yaml")
    for name, parent in files.items():
        write(f"extends: {parent}.yaml\n", f"{name}.yaml")
    with pytest.raises(SpecError) as caught:
        load(Path("a.yaml"))
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nextends: nope.yaml\n", "x.yaml:2: extends: no such file: nope.yaml"),
        ("extends: [a.yaml]\n", "x.yaml:1: extends: must be the name of one spec file, not a list"),
        ('extends: ""\n', "x.yaml:1: extends: must be the name of one spec file, not ''"),
        ("extends: 3\n", "x.yaml:1: extends: must be the name of one spec file, not 3"),
        ("name: x\nextends: .\n", "x.yaml:2: extends: is not a regular file: "),
        ("name: x\nextends: pipe.yaml\n", "x.yaml:2: extends: is not a regular file: "),
        ("name: x\nextends: large.yaml\n", "x.yaml:2: extends: is larger than 1 MB: "),
        ("extends: bad.yaml\n", "bad.yaml:1: series: on is a boolean"),
    ],
)
def test_extends_must_be_a_file(text: str, message: str) -> None:
    """A parent that cannot be opened is the fault of the line that names it; its own YAML is its own fault."""
    os.mkfifo("pipe.yaml")
    Path("large.yaml").write_bytes(b"x" * 1_000_001)
    write("series: on\n", "bad.yaml")
    assert message in refusal(text).message


def test_an_error_names_the_file_that_wrote_the_value() -> None:
    write(BASE.replace("flash_attn: auto", "flash_atn: auto"), "base.yaml")
    write("\n\nextends: base.yaml\nsession:\n  cycles: 1\n", "middle.yaml")
    error = refusal("extends: middle.yaml\n\nenv:\n  A: x\n  B: 2\n")
    assert error.details.splitlines() == [
        "base.yaml:14: bench[2].batched-bench.flash_atn: unknown key; did you mean flash_attn?",
        "middle.yaml:5: session.cycles: must be at least 2, not 1",
        'x.yaml:5: env.B: must be text, not 2: quote it: "2"',
    ]
    assert error.next == "${EDITOR:-vi} base.yaml"


# -- --set


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (["session.cycles=4", "session.cycles=5", "session.drift_limit=0.1"], "session", Session(5, "hot", 0.1)),
        (["hypothesis=a = b"], "hypothesis", "a = b"),
        (["series=w4a16"], "series", ("w4a16",)),
        (["env.NEW='1'"], "env", {"GGML_CUDA_FORCE_MMQ": "1", "NEW": "1"}),
        (["models.small.path=/s"], "models", {**MODELS, "small": FileModel("/s")}),
        (["models.q4k={synthetic: {}}"], "models", {**SMALL, "q4k": SyntheticModel()}),
    ],
)
def test_what_is_set(overrides: list[str], field: str, value: object) -> None:
    """The value is YAML, later ones win, open maps take new keys, and a model of another kind replaces."""
    assert getattr(read("", *overrides), field) == value


def test_of_names_with_dots_the_longest_key_is_meant() -> None:
    child = read("models: {qwen3.6-27b: {path: /q.gguf}}\n", "models.qwen3.6-27b.path=/z.gguf")
    assert child.models["qwen3.6-27b"] == FileModel("/z.gguf")


def test_a_path_can_be_typed_as_errors_print_it() -> None:
    child = read("", "bench.1.llama-bench.n_prompt.1=64", "bench[2].batched-bench.npl=4")
    assert child.bench[1:] == (
        LlamaBench("q4k", (512, 64), (128,), {"n_ubatch": (512, 2048)}),
        BatchedBench("small", (128,), (64,), (4,), {"flash_attn": (-1,)}),
    )


def test_host_wins_over_the_spec_and_must_be_a_name() -> None:
    assert read("host: dgx\n", host="h200").host == "h200"
    for host in ("-oProxyCommand=x", "a\udcff"):
        with pytest.raises(SpecError, match="--host: host: must be"):
            read("", host=host)


def test_what_may_be_set_in_a_gate() -> None:
    """Expectations and the limit: the gate stays the same gate."""
    gate, cases = replace(PARITY, overridden=True), "0123456789abcdef"
    child = read("", "gates.0.backend-ops.expect=1188/1188", "gates.0.backend-ops.unsupported=null")
    assert child.gates == (replace(gate, expect=Expectation(1188, 1188), unsupported=None),)
    assert read("", "gates[0].backend-ops.expect=null").gates == (replace(gate, expect=None),)
    assert read("", f"gates.0.backend-ops.cases={cases}").gates == (replace(gate, cases=cases),)


def test_a_gate_that_must_reach_what_the_file_says_is_not_marked() -> None:
    gates = "gates:\n  - backend-ops: {op: ADD, backend: CPU, expect: 5/5}\n"
    first, second = read(gates, "gates.0.backend-ops.limit_s=60", "gates.1.backend-ops.expect=null").gates
    assert first == replace(PARITY, limit_s=60)
    assert second == ParityGate("ADD", "CPU", overridden=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sesion.cycles=3", "--set: sesion: unknown key; did you mean session?"),
        ("session.cycels=3", "--set: session.cycels: unknown key; did you mean cycles?"),
        ("bench.0.backend-ops.wher={m: 1}", "--set: bench[0].backend-ops.wher: unknown key; did you mean where?"),
        ("n_gen=3", "--set: n_gen: unknown key; did you mean bench.1.llama-bench.n_gen?"),
        ("bench.1.n_gen=3", "--set: bench[1].n_gen: unknown key; did you mean bench.1.llama-bench.n_gen?"),
        ("model=q4k", "--set: model: unknown key; did you mean models?"),
        ("models.q4.path=/x", "--set: models.q4: no such model; did you mean q4k?"),
        ("bench.9.llama-bench.n_gen=1", "--set: bench.9: bench is a list of 3: say its place, counted from 0"),
        ("bench.llama-bench.n_gen=1", "--set: bench.llama-bench: bench is a list of 3"),
        ("bench.-1=1", "--set: bench.-1: bench is a list of 3"),
        ("session.cycles.x=1", "--set: session.cycles.x: there is no such key: session.cycles is neither a map nor "),
        ("session.cycles=[3", "--set: session.cycles: is not YAML: "),
        ("session.cycles=on", "--set: session.cycles: on is a boolean to YAML 1.1"),
        ("session={cycles: [1, 012]}", "--set: session.cycles[1]: 012 is an octal number"),
        ("session.cycles=", "--set: session.cycles: must be a whole number, not nothing"),
        ("session.cycles=1", "--set: session.cycles: must be at least 2, not 1"),
        ("cmake.X=&a 1", "--set: cmake.X: anchor &a: leave it out"),
        ("env.A=1", "--set: env.A: must be text, not 1: write --set 'env.A=\"1\"'"),
        ("session", "--set: 'session' is not key=value, as in session.cycles=4"),
        ("=3", "--set: '=3' is not key=value"),
        ("a..b=3", "is not key=value"),
        ("extends=other.yaml", "--set: extends: is read before --set"),
        ("gates=[]", "--set: gates: only gates.N.backend-ops.{expect,unsupported,cases,limit_s} can be set"),
        ("gates.0={engaged: {stderr: x}}", "no gate can be removed or exchanged"),
        ("gates.0.backend-ops.op=ADD", "no gate can be removed or exchanged"),
        ("gates.0.backend-ops.env={A: '1'}", "no gate can be removed or exchanged"),
        ("gates.7.backend-ops.expect=1/1", "--set: gates.7: gates is a list of 1"),
        ("a" + ".a" * 100_000 + "=1", "is not key=value"),
        ("cmake.X=" + "[" * 3000, "--set: cmake.X: is nested more than 32 deep"),
        ("cmake.X=" + "x" * 1_000_001, "--set: cmake.X: is larger than 1 MB"),
        ("cmake.X=\udcff", "--set: cmake.X: holds a character that is not allowed, U+DCFF"),
    ],
    ids=lambda text: text[:40],
)
def test_what_cannot_be_set(override: str, message: str) -> None:
    assert message in child_refusal("", override).message
