"""`extends`: what merges, what appends, what replaces, and whose line an error names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import EngagedGate, Expectation, FileModel, LlamaBench, ParityGate, Session, SyntheticModel
from dgxlab.spec import load
from tests.spec.specs import BASE, PIN, child_refusal, read, refusal, write


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
        ("series: [c]\n", "series", ("c",)),
        ("series: []\n", "series", ()),
        ("llama_cpp: {sources: [/src]}\n", "sources", ("/src",)),
        ("bench: [{llama-bench: {model: q4k, n_gen: 8}}]\n", "bench", (LlamaBench("q4k", (), (8,)),)),
        (
            "models: {small: {synthetic: {n_layer: 3}}}\n",
            "models",
            {"q4k": FileModel("~/models/q4k.gguf"), "small": SyntheticModel(n_layer=3, seed=7)},
        ),
        (
            "models: {small: {path: ~/s.gguf}, q4k: {synthetic: {seed: 1}}}\n",
            "models",
            {"q4k": SyntheticModel(seed=1), "small": FileModel("~/s.gguf")},
        ),
    ],
)
def test_what_a_child_gets(child: str, field: str, value: object) -> None:
    """Maps and models of one kind merge, lists and models of another kind replace; name and hypothesis are its own."""
    write(BASE + "series: [a, b]\nhypothesis: base wins\n", "base.yaml")
    assert getattr(load(write(f"extends: base.yaml\n{child}")), field) == value


PARITY = ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103), 306)


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        ("[]", (PARITY,)),
        ("[engaged: {stderr: 'm:'}]", (PARITY, EngagedGate("m:"))),
        ("[backend-ops: {op: ADD, backend: CPU}]", (PARITY, ParityGate("ADD", "CPU"))),
        ("[backend-ops: {op: MUL_MAT, backend: CUDA0}]", (PARITY, ParityGate("MUL_MAT", "CUDA0"))),
        (
            "[backend-ops: {op: MUL_MAT, backend: CPU, env: {A: '1'}}]",
            (PARITY, ParityGate("MUL_MAT", "CPU", env={"A": "1"})),
        ),
        (
            "[backend-ops: {op: MUL_MAT, backend: CPU, expect: 1188/1188}]",
            (ParityGate("MUL_MAT", "CPU", Expectation(1188, 1188), 306),),
        ),
        (
            "[backend-ops: {op: MUL_MAT, backend: CPU, env: {}, limit_s: 9}]",
            (ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103), 306, limit_s=9.0),),
        ),
        ("[backend-ops: {op: MUL_MAT, backend: CPU, expect: null}]", (ParityGate("MUL_MAT", "CPU", None, 306),)),
        ("[backend-ops: {backend: CPU, op: MUL_MAT}]", (PARITY,)),
    ],
)
def test_gates_append_or_refine_and_never_vanish(gates: str, expected: tuple[object, ...]) -> None:
    """Another gate appends; the inherited one stated again keeps its place and what the child does not say."""
    assert read(f"gates: {gates}\n").gates == expected


def test_an_engaged_gate_stated_again_is_the_same_gate() -> None:
    """Marker and tools are its identity; another tool makes another gate, so that none is narrowed."""
    write(BASE + "", "base.yaml")
    write("extends: base.yaml\ngates: [engaged: {stderr: 'm:', tools: [llama-bench, backend-ops]}]\n", "middle.yaml")
    same = load(
        write("extends: middle.yaml\ngates: [engaged: {stderr: 'm:', tools: [backend-ops, llama-bench]}]\n", "a.yaml")
    )
    assert [type(gate) for gate in same.gates] == [ParityGate, EngagedGate]
    narrower = load(write("extends: middle.yaml\ngates: [engaged: {stderr: 'm:', tools: backend-ops}]\n", "b.yaml"))
    assert [gate.tools for gate in narrower.gates if isinstance(gate, EngagedGate)] == [
        ("llama-bench", "backend-ops"),
        ("backend-ops",),
    ]


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
            "x.yaml:6: gates[0].backend-ops.expect: must be all of a positive number of cases, as in 1103/1103, not "
            "'12/13'",
        ),
    ],
)
def test_gates_that_are_refused(gates: str, message: str) -> None:
    """None vanishes, none is stated twice in one file, and an error in a refined one names the child's line."""
    assert child_refusal(gates).message == message


def test_a_chain_across_folders() -> None:
    """Each extends is relative to the file that says it."""
    write(BASE, "a/base.yaml")
    write("extends: ../a/base.yaml\nenv: {MIDDLE: '1'}\n", "b/middle.yaml")
    child = load(write("extends: ../../b/middle.yaml\n", "c/d/child.yaml"))
    assert child.env == {"GGML_CUDA_FORCE_MMQ": "1", "MIDDLE": "1"}


def test_a_long_chain() -> None:
    """A chain may have any length: 1,500 files are no recursion."""
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
    """The error lists the files of the circle, at the line that closes it; a link is the file itself."""
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
    """Lines are exact through a chain of three files, whoever is asked for."""
    write(BASE.replace("flash_attn: auto", "flash_atn: auto"), "base.yaml")
    write("\n\nextends: base.yaml\nsession:\n  cycles: 1\n", "middle.yaml")
    error = refusal("extends: middle.yaml\n\nenv:\n  A: x\n  B: 2\n")
    assert error.details.splitlines() == [
        "base.yaml:14: bench[2].batched-bench.flash_atn: unknown key; did you mean flash_attn?",
        "middle.yaml:5: session.cycles: must be at least 2, not 1",
        'x.yaml:5: env.B: must be text, not 2: quote it: "2"',
    ]
    assert error.next == "dgxlab plan x.yaml"
