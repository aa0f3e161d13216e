"""A profile through the agent: the tracer's files travel, the trace becomes kernels in the record, which is sound."""

from pathlib import Path

import pytest

from dgxlab import audit
from dgxlab.errors import RemoteError, SpecError
from dgxlab.model import Experiment
from dgxlab.tools import ProfileBench
from tests.conftest import PROJECT
from tests.lab.conftest import ToyLab, kinds
from tests.tools.traces import tokens, trace

KERNELS = {"void mul_mat_q<(ggml_type)40, 64, false>(char const*)": [3000, 1000], "rms_norm_f32(float*)": [500]}
BENCH = ProfileBench("m", (16,), (2,), (1, 8))

# the toy has no GPU: in place of what the library writes, a file beside it
RUN = """set -e
test -f "$(dirname "$0")/trace.cpp"
"$@"
cat "$(dirname "$0")/trace.tsv"
"""


@pytest.fixture
def traced(toy_lab: ToyLab) -> ToyLab:
    folder = toy_lab.folder / "kernels" / "trace"
    folder.mkdir(parents=True)
    for name in ("Makefile", "trace.cpp"):
        (folder / name).write_text((PROJECT / "kernels" / "trace" / name).read_text())
    (folder / "run.sh").write_text(RUN)
    lay(folder, trace([(count, KERNELS) for count in tokens(16, 2, [1, 8])]))
    return toy_lab


def lay(folder: Path, text: str) -> None:
    (folder / "trace.tsv").write_text(text)


def profile(traced: ToyLab) -> Experiment:
    return traced.experiment(gates=(), bench=(BENCH,))


def test_kernels_are_measured(traced: ToyLab) -> None:
    outcome, events = traced.run_well(profile(traced))
    (run,) = kinds(events, "run")
    assert [run["status"], len(run["cells"])] == ["valid", 4 + 4 * 2]
    assert (outcome.planned, outcome.measured) == (4, 4)
    assert not (traced.root / "jobs" / outcome.job_id / "files").exists()
    rows = traced.lab.store.rows(
        """SELECT json_extract(params, '$.kernel') AS kernel, json_extract(params, '$.phase') AS phase, metric, value, n
           FROM measurements JOIN cells USING (cell) WHERE json_extract(params, '$.pl') = 8"""
    )
    values = {(row["phase"], row["kernel"], row["metric"]): (row["value"], row["n"]) for row in rows}
    assert values["decode", "mul_mat_q<40, 64, false>", "step_us"] == (4.0, 3)
    assert values["decode", "mul_mat_q<40, 64, false>", "launch_us"] == (2.0, 1)
    assert values["decode", "all", "launches"] == (3.0, 1)
    assert values["prompt", "all", "busy_us"] == values["prompt", "all", "wall_us"] == (4.5, 3)
    assert audit.check(traced.lab.store) == []
    again, _ = traced.run(profile(traced))
    assert again.job_id == ""


def test_a_trace_that_does_not_fit_gives_nothing(traced: ToyLab) -> None:
    lay(traced.folder / "kernels" / "trace", trace([(16, KERNELS), (16, KERNELS)]))
    error, events = traced.fail(RemoteError, profile(traced))
    assert "2 passes" in error.message
    assert [run["results"] for run in kinds(events, "run")] == [[]]


def test_two_builds_are_not_compared_by_profiles(traced: ToyLab) -> None:
    other = traced.experiment(name="other", gates=(), bench=(BENCH,))
    with pytest.raises(SpecError, match="in common"):
        traced.run(other, "ab", baseline=profile(traced))


def test_the_flags_are_those_of_the_program(traced: ToyLab) -> None:
    bench = ProfileBench("m", (16,), (2,), (1, 8), args=("--no-such-flag",))
    outcome, _ = traced.run(traced.experiment(gates=(), bench=(bench,)))
    assert outcome.error is not None
    assert "not know --no-such-flag" in outcome.error.message


def test_a_project_without_a_tracer_is_told(toy_lab: ToyLab) -> None:
    with pytest.raises(SpecError, match="kernels/trace has no Makefile"):
        toy_lab.run(profile(toy_lab))
