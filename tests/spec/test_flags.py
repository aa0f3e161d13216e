"""The tables of flags: what plans turn axes into, and what raw arguments may not say."""

from __future__ import annotations

import pytest

from dgxlab import matrix
from dgxlab.spec import flags
from dgxlab.spec.entries import BatchedBenchSpec, LlamaBenchSpec


def test_plans_and_specs_agree_on_axes() -> None:
    """Every axis that a spec may name has a flag in a plan, and it is the one that args may not repeat."""
    for planned, known in (
        (matrix.LLAMA_BENCH_FLAGS, flags.LLAMA_BENCH_AXES),
        (matrix.BATCHED_FLAGS, flags.BATCHED_BENCH_AXES),
    ):
        assert planned.keys() == known.keys()
        assert all(flag in known[axis] for axis, flag in planned.items())


def test_every_axis_is_a_key_of_its_entry() -> None:
    """The tables name no key that the schema does not have."""
    assert {*flags.LLAMA_BENCH_SIZES, *flags.LLAMA_BENCH_AXES} <= LlamaBenchSpec.model_fields.keys()
    assert {*flags.BATCHED_BENCH_SIZES, *flags.BATCHED_BENCH_AXES} <= BatchedBenchSpec.model_fields.keys()


@pytest.mark.parametrize(
    ("tool", "args", "places"),
    [
        ("llama-bench", ["--prio", "2", "-v", "--numa", "isolate"], []),
        ("llama-bench", ["--ubatch-size", "5"], [0]),
        ("llama-bench", ["--ubatch_size", "5"], [0]),
        ("llama-bench", ["-ub=5"], [0]),
        ("llama-bench", ["-v", "-r", "5", "-o", "md"], [1, 3]),
        ("llama-bench", ["-npp", "5"], []),
        ("batched-bench", ["-pps", "-tgs", "--kv-unified"], []),
        ("batched-bench", ["-npp", "5", "--n_gpu_layers", "3"], [0, 2]),
        ("batched-bench", ["--model-url", "x", "--version"], [0, 2]),
        ("batched-bench", ["x-m"], []),
    ],
)
def test_refused_arguments(tool: str, args: list[str], places: list[int]) -> None:
    """Flags that have a key, that dgxlab sets, or that measure nothing are found in every spelling."""
    assert list(flags.refused(tool, args)) == places
