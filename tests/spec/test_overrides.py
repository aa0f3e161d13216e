"""`--set key=value`."""

from __future__ import annotations

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import BatchedBench, Expectation, FileModel, LlamaBench, ParityGate, Session, SyntheticModel
from tests.spec.specs import child_refusal, read

MODELS = {"q4k": FileModel("~/models/q4k.gguf"), "small": SyntheticModel(n_layer=2, seed=7)}


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        (["session.cycles=4", "session.cycles=5", "session.drift_limit=0.1"], "session", Session(5, "hot", 0.1)),
        (["hypothesis=a = b"], "hypothesis", "a = b"),
        (["series=w4a16"], "series", ("w4a16",)),
        (["env.NEW='1'"], "env", {"GGML_CUDA_FORCE_MMQ": "1", "NEW": "1"}),
        (["models.small.path=/s"], "models", {**MODELS, "small": FileModel("/s")}),
        (["models.q4k={synthetic: {}}"], "models", {**MODELS, "q4k": SyntheticModel()}),
    ],
)
def test_what_is_set(overrides: list[str], field: str, value: object) -> None:
    """The value is YAML, later ones win, open maps take new keys, and a model of another kind replaces."""
    assert getattr(read("", *overrides), field) == value


def test_a_name_with_dots() -> None:
    """The longest key that is there is meant."""
    child = read("models: {qwen3.6-27b: {path: /q.gguf}}\n", "models.qwen3.6-27b.path=/z.gguf")
    assert child.models["qwen3.6-27b"] == FileModel("/z.gguf")


def test_places_in_lists() -> None:
    """A path can be typed as errors print it, and its last part may be a place."""
    child = read("", "bench.1.llama-bench.n_prompt.1=64", "bench[2].batched-bench.npl=4")
    assert child.bench[1:] == (
        LlamaBench("q4k", (512, 64), (128,), {"n_ubatch": (512, 2048)}),
        BatchedBench("small", (128,), (64,), (4,), {"flash_attn": (-1,)}),
    )


def test_host() -> None:
    """--host wins over the spec, and must be a name."""
    assert read("host: dgx\n", host="h200").host == "h200"
    for host in ("-oProxyCommand=x", "a\udcff"):
        with pytest.raises(SpecError, match="--host: host: must be a name of "):
            read("", host=host)


def test_what_may_be_set_in_a_gate() -> None:
    """Expectations and the limit: the gate stays the same gate."""
    child = read("", "gates.0.backend-ops.expect=1188/1188", "gates.0.backend-ops.unsupported=null")
    assert child.gates == (ParityGate("MUL_MAT", "CPU", Expectation(1188, 1188), None, overridden=True),)
    assert read("", "gates[0].backend-ops.expect=null").gates == (
        ParityGate("MUL_MAT", "CPU", None, 306, overridden=True),
    )
    (listed,) = read("", "gates.0.backend-ops.cases=0123456789abcdef").gates
    assert isinstance(listed, ParityGate)
    assert (listed.cases, listed.overridden) == ("0123456789abcdef", True)


def test_a_gate_that_must_reach_what_the_file_says_is_not_marked() -> None:
    """A longer time, or another gate's count, changes nothing for it."""
    gates = "gates:\n  - backend-ops: {op: ADD, backend: CPU, expect: 5/5}\n"
    first, second = read(gates, "gates.0.backend-ops.limit_s=60", "gates.1.backend-ops.expect=null").gates
    assert isinstance(first, ParityGate)
    assert isinstance(second, ParityGate)
    assert (first.limit_s, first.overridden, second.overridden) == (60, False, True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sesion.cycles=3", "--set: sesion: unknown key; did you mean session?"),
        ("session.cycels=3", "--set: session.cycels: unknown key; did you mean cycles?"),
        ("bench.0.backend-ops.wher={m: 1}", "--set: bench[0].backend-ops.wher: unknown key; did you mean where?"),
        ("models.q4.path=/x", "--set: models.q4: no such model; did you mean q4k?"),
        ("bench.9.llama-bench.n_gen=1", "--set: bench.9: bench is a list of 3: say its place, counted from 0"),
        ("bench.llama-bench.n_gen=1", "--set: bench.llama-bench: bench is a list of 3"),
        ("bench.-1=1", "--set: bench.-1: bench is a list of 3"),
        (
            "session.cycles.x=1",
            "--set: session.cycles.x: there is no such key: session.cycles is neither a map nor a list",
        ),
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
    """An unknown path, a value that does not fit, and every way around a gate are errors marked --set."""
    assert message in child_refusal("", override).message
