"""`extends`: what merges, what appends, what replaces, and whose line an error names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import EngagedGate, Expectation, FileModel, ParityGate, SyntheticModel
from dgxlab.spec import load
from tests.spec.specs import BASE, PIN, child_refusal, read, refusal, write


def test_a_child_names_only_what_differs() -> None:
    """Everything else is the parent's."""
    parent = load(write(BASE, "base.yaml"))
    child = read("name: child\nseries: [w4a16]\n")
    assert (child.name, child.series) == ("child", ("w4a16",))
    assert (child.pin, child.cmake, child.env, child.models) == (PIN, parent.cmake, parent.env, parent.models)
    assert (child.gates, child.bench, child.session) == (parent.gates, parent.bench, parent.session)


def test_maps_merge_key_by_key() -> None:
    """A child's keys are added to the parent's maps and win over the same keys."""
    child = read('cmake: {GGML_CUDA: false, GGML_CUDA_FA: false}\nenv: {B: "2"}\nsession: {thermal: cold}\n')
    assert child.cmake == {"GGML_CUDA": "OFF", "CMAKE_CUDA_ARCHITECTURES": "121", "GGML_CUDA_FA": "OFF"}
    assert child.env == {"GGML_CUDA_FORCE_MMQ": "1", "B": "2"}
    assert (child.session.cycles, child.session.thermal) == (6, "cold")


def test_lists_replace() -> None:
    """series, sources and bench are the child's alone."""
    write(BASE + "series: [a, b]\n", "base.yaml")
    child = load(
        write(
            "extends: base.yaml\nseries: [c]\nllama_cpp: {sources: [/src/llama.cpp]}\n"
            "bench: [{llama-bench: {model: q4k, n_gen: 8}}]\n"
        )
    )
    assert (child.series, child.sources, child.pin) == (("c",), ("/src/llama.cpp",), PIN)
    assert [type(entry).__name__ for entry in child.bench] == ["LlamaBench"]


def test_an_empty_list_replaces_too() -> None:
    """A child can go back to no series."""
    write(BASE + "series: [a]\n", "base.yaml")
    assert load(write("extends: base.yaml\nseries: []\n")).series == ()


def test_models_of_one_kind_merge_and_of_another_kind_replace() -> None:
    """A synthetic model keeps what the child does not name; a file in its place leaves nothing of the recipe."""
    child = read("models:\n  small: {synthetic: {n_layer: 3}}\n  q4k: {synthetic: {seed: 1}}\n  new: {path: /n.gguf}\n")
    assert child.models == {
        "small": SyntheticModel(n_layer=3, seed=7),
        "q4k": SyntheticModel(seed=1),
        "new": FileModel("/n.gguf"),
    }
    assert read("models: {small: {path: ~/s.gguf}}\n").models["small"] == FileModel("~/s.gguf")


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


def test_a_gate_cannot_be_stated_twice_in_one_file() -> None:
    """Which of the two expectations counts would be a guess."""
    gates = "gates:\n  - backend-ops: {op: ADD, backend: CPU}\n  - backend-ops: {op: ADD, backend: CPU, expect: 3/3}\n"
    assert child_refusal(gates).message == "x.yaml:4: gates[1]: is the same gate as at line 3"


def test_gates_cannot_be_nulled() -> None:
    """A child that writes nothing, or a map, under gates is refused, not obeyed."""
    assert child_refusal("gates:\n").message == "x.yaml:2: gates: must be a list, not nothing"
    assert child_refusal("gates: {}\n").message == "x.yaml:2: gates: must be a list, not an empty map"


def test_name_and_hypothesis_are_not_inherited() -> None:
    """A child without a name is called like its file, and does not claim its parent's hypothesis."""
    write(BASE + "hypothesis: base wins\n", "base.yaml")
    child = load(write("extends: base.yaml\n", "w4a16-tuned.yaml"))
    assert (child.name, child.hypothesis) == ("w4a16-tuned", "")


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
        ({"a": "d/../a"}, "a.yaml:1: extends: goes round in a circle: a.yaml -> a.yaml"),
    ],
)
def test_a_circle_is_named(files: dict[str, str], message: str) -> None:
    """The error lists the files of the circle, and stands at the line that closes it."""
    for name, parent in files.items():
        write(f"extends: {parent}.yaml\n", f"{name}.yaml")
    with pytest.raises(SpecError) as caught:
        load(Path("a.yaml"))
    assert caught.value.message == message


def test_a_circle_through_a_link() -> None:
    """The same file under another name is the same file."""
    write("extends: link.yaml\n", "a.yaml")
    Path("link.yaml").symlink_to("a.yaml")
    with pytest.raises(SpecError, match=r"circle: a\.yaml -> link\.yaml"):
        load(Path("a.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\nextends: nope.yaml\n", "x.yaml:2: extends: no such file: nope.yaml"),
        ("extends: [a.yaml]\n", "x.yaml:1: extends: must be the name of one spec file, not a list"),
        ('extends: ""\n', "x.yaml:1: extends: must be the name of one spec file, not ''"),
        ("extends: 3\n", "x.yaml:1: extends: must be the name of one spec file, not 3"),
        ("extends: .\n", ": is not a regular file"),
    ],
)
def test_extends_must_be_a_file(text: str, message: str) -> None:
    """A parent that is not there is the fault of the line that names it."""
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


def test_an_error_in_a_merged_gate_names_the_child() -> None:
    """A refined gate keeps its place in the list, and the child's line for what the child wrote."""
    gates = "gates:\n  - backend-ops:\n      op: MUL_MAT\n      backend: CPU\n      expect: 12/13\n"
    assert child_refusal(gates).message == (
        "x.yaml:6: gates[0].backend-ops.expect: must be all of a positive number of cases, as in 1103/1103, not '12/13'"
    )


def test_yaml_errors_of_a_parent_name_the_parent() -> None:
    """A parent that cannot be read ends the child with the parent's own line."""
    write(BASE + "series: on\n", "base.yaml")
    assert refusal("extends: base.yaml\n").message.startswith("base.yaml:16: series: on is a boolean")


def test_a_parent_that_is_no_file_is_the_fault_of_the_line() -> None:
    """A pipe, a folder and what is too large are named where they are extended."""
    os.mkfifo("pipe.yaml")
    Path("large.yaml").write_bytes(b"x" * 1_000_001)
    for name, why in (
        ("pipe.yaml", "is not a regular file"),
        (".", "is not a regular file"),
        ("large.yaml", "is larger than 1 MB"),
    ):
        message = refusal(f"name: x\nextends: {name}\n").message
        assert message.startswith(f"x.yaml:2: extends: {why}: ")
