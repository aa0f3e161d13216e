"""`run` end to end on this machine, with programs that do as they are told."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab import report
from dgxlab.cli._display import Lines
from dgxlab.errors import BuildFailed, GateFailed, RemoteError, UsageError
from dgxlab.lab import raw
from dgxlab.model import EngagedGate, Expectation, ParityGate
from dgxlab.model.events import read
from tests import toy
from tests.journals import words
from tests.lab.conftest import ToyLab, kinds
from tests.machines import script


def test_everything_is_built_gated_measured_and_recorded(toy_lab: ToyLab) -> None:
    outcome, events = toy_lab.run_well()
    assert (outcome.planned, outcome.reused) == (8, 0)
    assert [gate["status"] for gate in kinds(events, "gate")] == ["passed"]
    assert set(toy_lab.values()) == {
        "MUL_MAT type_a=q4_0 m=4096 k=14336 n=8",
        "MUL_MAT type_a=q4_0 m=4096 k=14336 n=512",
        *("pp16", "pp32", "tg4"),
        *("pp16 tg4 B1", "pp16 tg4 B2", "pp16 tg4 B4"),
    }
    assert toy_lab.values()["pp16 tg4 B4"] == 128.0
    sql = "SELECT value, discarded FROM samples JOIN cells USING (cell) WHERE label = 'pp16' ORDER BY ordinal"
    samples = toy_lab.lab.store.rows(sql)
    assert len(samples) == 6
    assert [row["value"] for row in samples if row["discarded"]] == [800.0]  # the cold first repetition
    assert toy_lab.lab.store.job(outcome.job_id).state == "done"


def test_a_new_cell_is_measured_alone(toy_lab: ToyLab) -> None:
    toy_lab.run()
    grown = toy_lab.experiment(bench=(toy.backend_ops(), toy.llama_bench(n_prompt=(16, 32, 64)), toy.batched_bench()))
    outcome, events = toy_lab.run(grown)
    (run,) = kinds(events, "run")
    assert [cell["label"] for cell in run["cells"].values()] == ["pp64"]
    assert (outcome.planned, outcome.reused, kinds(events, "gate")) == (9, 8, [])


BROKEN = {
    "hang": "ran past its limit of 1 s",
    "crash": "was killed by SIGSEGV",
    "killed": "was killed by SIGKILL",
    "status": "exit status 7: error: out of toys",
    "nothing": "pp32: it has no row",
    "backtrace": "line",
}


def test_a_broken_benchmark_costs_its_own_cells_only(toy_lab: ToyLab) -> None:
    broken = [toy.llama_bench(env={"TOY": how}, **{"limit_s": 1.0} if how == "hang" else {}) for how in BROKEN]
    _, events = toy_lab.fail(RemoteError, toy_lab.experiment(bench=(toy.backend_ops(), *broken, toy.batched_bench())))
    failed = [run["reason"] for run in kinds(events, "run") if run["tool"] == "llama-bench"]
    assert [reason in run for reason, run in zip(BROKEN.values(), failed, strict=True)] == [True] * len(BROKEN)
    assert not {"pp16", "pp32", "tg4"} & set(toy_lab.values())
    assert len(toy_lab.values()) == 5
    _, events = toy_lab.run_well()
    assert [run["tool"] for run in kinds(events, "run")] == ["llama-bench"]


def test_lost_rows_are_run_again(toy_lab: ToyLab) -> None:
    entry = toy.batched_bench(env={"TOY": "short"})
    outcome, events = toy_lab.run(toy_lab.experiment(bench=(entry,)))
    assert isinstance(outcome.error, RemoteError)
    assert "3" in outcome.error.message
    assert [run["status"] for run in kinds(events, "run")] == ["failed"] * 3
    assert toy_lab.values() == {}
    attempts = {"raw/run-0.out", "raw/run-0-1.out", "raw/run-0-2.out"}
    assert attempts <= set(raw.listing(raw.path_of(toy_lab.lab.raw, outcome.job_id)))
    assert raw.describe(toy_lab.lab.store.job(outcome.job_id), "raw/run-0-2.out") == "run:0 batched-bench 2 stdout"


FAILING, HOW = "MUL_MAT(type_a=q4_0,n=9)", "ERR = 0.01 > 0.0005"  # the toy's case that fails


def test_a_flaky_case_is_recorded_and_passes(toy_lab: ToyLab, tmp_path: Path) -> None:
    env = {"TOY": "flaky", "TOY_COUNT": str(tmp_path / "calls")}
    outcome, events = toy_lab.run(toy_lab.experiment(gates=(toy.parity(env=env),)))
    (gate,) = kinds(events, "gate")
    assert outcome.error is None
    assert f"{FAILING} failed ({HOW}), and not in 3 runs more" in [each.get("note") for each in events]
    cases = gate["readings"]["arm"]
    assert (gate["status"], gate["flaky"], cases["failed"], cases["passed"]) == ("flaky", [FAILING], [], 3)
    raw = toy_lab.root / "jobs" / outcome.job_id / "raw"
    assert len(list(raw.glob("gate-0*.out"))) == len(gate["commands"]) == 4
    assert gate["seconds"] == pytest.approx(sum(command["seconds"] for command in gate["commands"]))
    assert {"stdout", "again 1 stdout", "again 3 stderr"} <= set(gate["raw"])
    assert (tmp_path / "calls").read_text() == "xxxx"


def test_a_gate_is_run_again_where_rounding_can_make_a_case_fail(toy_lab: ToyLab, tmp_path: Path) -> None:
    env = {"TOY": "rounding", "TOY_COUNT": str(tmp_path / "calls")}
    outcome, events = toy_lab.run(toy_lab.experiment(gates=(toy.parity(env=env),)))
    (gate,) = kinds(events, "gate")
    how = "(ERR = 0.001 > 0.0005), as rounding can make it; run again with other inputs"
    assert f"MUL_MAT(type_a=q4_1,type_b=f32,m=16,n=1,k=256,o=1) failed {how}" in [each.get("note") for each in events]
    assert (gate["status"], gate["flaky"], gate["readings"]["arm"]["passed"]) == ("passed", [], 4)
    assert [command["rc"] for command in gate["commands"]] == [0, 1]
    names = ["by rounding stderr", "by rounding stdout", "stderr", "stdout"]
    assert (outcome.error, sorted(gate["raw"])) == (None, names)
    assert toy_lab.lab.store.rows("SELECT status, rc, passed FROM gates") == [
        {"status": "passed", "rc": 0, "passed": 4}
    ]


@pytest.mark.parametrize(
    ("how", "reasons"),
    [
        ("wrong in the suite", ["expected 4/4, got 3/4", f"failed: {FAILING} ({HOW})", "run again: the same"]),
        (
            "flaky, then fewer",
            ["expected 4/4, got 3/4", f"failed: {FAILING} ({HOW})", "run again: expected 4/4, got 3/3"],
        ),
    ],
)
def test_a_case_that_fails_must_pass_with_those_before_it(
    toy_lab: ToyLab, tmp_path: Path, how: str, reasons: list[str]
) -> None:
    env = {"TOY": how, "TOY_COUNT": str(tmp_path / "calls")}
    outcome, events = toy_lab.run(toy_lab.experiment(gates=(toy.parity(env=env),)))
    (gate,) = kinds(events, "gate")
    assert isinstance(outcome.error, GateFailed)
    cases = gate["readings"]["arm"]
    assert (gate["status"], gate["flaky"], cases["failed"], words(gate)) == ("failed", [], [FAILING], reasons)


def test_as_many_cases_of_another_list_do_not_pass(toy_lab: ToyLab) -> None:
    gate = ParityGate("MUL_MAT", "CPU")
    _, events = toy_lab.run(toy_lab.experiment(gates=(gate,)))
    (first,) = kinds(events, "gate")
    store = toy_lab.lab.store
    assert store.case_list(first["readings"]["arm"]["cases"]) == first["case_list"]
    assert len(first["case_list"]) == 5

    again, events = toy_lab.run(toy_lab.experiment(gates=(gate,)), again=True)
    (second,) = kinds(events, "gate")
    assert again.error is None
    assert second["gate"]["cases"] == first["readings"]["arm"]["cases"]
    assert (second["gate"]["expect"], second["gate"]["unsupported"]) == ({"passed": 4, "total": 4}, 1)
    assert "case_list" not in second  # the record has it

    fooled = replace(gate, env={"TOY": "one case"}, expect=Expectation(4, 4), cases=first["readings"]["arm"]["cases"])
    outcome, events = toy_lab.run(toy_lab.experiment(name="fooled", gates=(fooled,)))
    (third,) = kinds(events, "gate")
    assert isinstance(outcome.error, GateFailed)
    (reason,) = words(third)
    assert (
        f"{first['readings']['arm']['cases']}, got {third['readings']['arm']['cases']}: 5 cases, 2 of them repeated"
        in reason
    )
    differs = "missing: 2, as MUL_MAT(type_a=f32,n=2); repeated more often: 2, as MUL_MAT(type_a=f32,n=1)"
    assert differs in report.render(report.collect(store, "fooled"), wide=True)


@pytest.mark.parametrize(("variable", "status"), [("TOY_PATH", "passed"), ("TOY_PAHT", "failed")])
def test_a_gate_that_claims_a_path_fails_where_it_did_not_run(toy_lab: ToyLab, variable: str, status: str) -> None:
    gate = toy.parity(env={variable: "1"}, engaged="toy-path: on")
    _, events = toy_lab.run(toy_lab.experiment(gates=(gate,)))
    (event,) = kinds(events, "gate")
    reason = "the path under test did not run: 'toy-path: on' is not on test-backend-ops's stderr"
    assert (event["status"], words(event)) == (status, [] if status == "passed" else [reason])


def test_a_gate_that_the_command_line_changed_sets_nothing(toy_lab: ToyLab) -> None:
    weak = toy_lab.experiment(gates=(replace(toy.parity(env={"TOY": "fewer"}), expect=None, overridden=True),))
    outcome, events = toy_lab.run(weak)
    (gate,) = kinds(events, "gate")
    assert (outcome.error, gate["status"], gate["readings"]["arm"]["total"]) == (None, "passed", 3)
    store = toy_lab.lab.store
    assert store.rows("SELECT * FROM expectations") == []
    assert [line for line in Lines().of(read(gate)) if "recorded" in line] == []
    assert "passed (changed by --set), 3/3" in "".join(Lines().of(read(gate)))
    assert "| passed (changed by --set) |" in report.render(report.collect(store, "toy"))

    toy_lab.fail(GateFailed, toy_lab.experiment(gates=(toy.parity(env={"TOY": "fewer"}),)))


def test_engaged_marker_decides_whether_a_run_counts(toy_lab: ToyLab) -> None:
    here = EngagedGate("toy-marker:", ("backend-ops", "llama-bench"))
    bench = (toy.backend_ops(), toy.llama_bench())
    toy_lab.run_well(toy_lab.experiment(gates=(toy.parity(), here), bench=bench))
    _, events = toy_lab.fail(
        GateFailed,
        toy_lab.experiment(
            gates=(toy.parity(), EngagedGate("no such marker")), bench=(toy.llama_bench(n_prompt=(64,)),)
        ),
    )
    (run,) = kinds(events, "run")
    assert run["status"] == "discarded"
    assert "no such marker" in run["reason"]
    assert "pp64" not in toy_lab.values()


def test_runs_not_searched_for_the_marker_are_measured_again(toy_lab: ToyLab) -> None:
    """The same build, arguments and environment: only the marker says which path the code took."""
    toy_lab.run_well(toy_lab.experiment())
    lost, here = (EngagedGate(text, ("llama-bench",)) for text in ("no such marker", "toy-marker:"))
    toy_lab.fail(GateFailed, toy_lab.experiment(gates=(toy.parity(), lost)))
    assert "- llama-bench m: pp16, pp32, tg4 (discarded in " in report.render(report.collect(toy_lab.lab.store, "toy"))
    found = toy_lab.experiment(gates=(toy.parity(), here))
    outcome, _ = toy_lab.run_well(found)
    assert 0 < outcome.reused < outcome.planned  # the operations, and not the models
    assert outcome.measured + outcome.reused == outcome.planned
    assert "| pp16 | 1600 ± " in report.render(report.collect(toy_lab.lab.store, "toy"))
    for experiment in (found, toy_lab.experiment()):
        outcome, _ = toy_lab.run_well(experiment)
        assert outcome.reused == outcome.planned


def test_unknown_flag_is_refused_before_anything_is_measured(toy_lab: ToyLab) -> None:
    bench = (toy.backend_ops(), toy.llama_bench(args=("--no-such-flag", "1")))
    error, events = toy_lab.fail(UsageError, toy_lab.experiment(bench=bench))
    assert "--no-such-flag" in error.message
    assert (kinds(events, "run"), kinds(events, "gate")) == ([], [])


def test_one_edit_compiles_one_file(toy_lab: ToyLab) -> None:
    toy_lab.run()
    series = toy_lab.folder / "patches" / "edit"
    series.mkdir()
    kernel = toy_lab.folder / "kernels" / "kernel.c"
    kernel.parent.mkdir()
    (series / "series").write_text("overlay kernels/kernel.c ggml/kernel.c\n")
    for number in range(2):
        kernel.write_text(f"int kernel(void) {{ return {number}; }}\n")
        outcome, _ = toy_lab.run_well(toy_lab.experiment(series=("edit",)))
        log = (toy_lab.root / "jobs" / outcome.job_id / "build-toy.log").read_text()
        assert [line.split("/")[-1] for line in log.splitlines() if "Building C object" in line] == ["kernel.c.o"]
        assert ("cmake -S" in log) == (number == 0)
    assert len(toy_lab.lab.store.rows("SELECT build_id FROM builds")) == 3


def test_a_root_with_a_space_and_an_umlaut(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    lab = make_toy_lab(root=tmp_path / "my höst")
    lab.run_well()
    assert len(lab.values()) == 8


def test_the_build_loads_its_own_libraries(toy_lab: ToyLab) -> None:
    _, events = toy_lab.run()
    (build,) = kinds(events, "build")
    folder = toy_lab.root / "builds" / build["build_id"] / "bin"
    asked = {"test-backend-ops", "llama-bench", "llama-batched-bench"}
    others = {f"llama-{name}" for name in ("completion", "perplexity", "quantize", "server")}  # of other tests
    assert asked <= set(build["binaries"]) <= asked | others
    assert set(build["libraries"]) == {"libggml.so.0"}
    assert {path.name for path in folder.iterdir()} == {*build["binaries"], *build["libraries"]}


def test_a_program_that_would_load_another_arms_library_is_refused(toy_lab: ToyLab) -> None:
    error, _ = toy_lab.fail(BuildFailed, toy_lab.experiment(cmake={"CMAKE_BUILD_RPATH_USE_ORIGIN": "OFF"}))
    assert "would load libggml.so.0 from" in error.message
    assert toy_lab.values() == {}


def test_full_disk_is_said_and_what_was_measured_is_kept(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    # a limit on file size imitates the full disk; the agent itself still fits
    warm = make_toy_lab("warm")
    warm.run()
    blocks = max(agent.stat().st_size for agent in warm.root.glob("agent/*.pyz")) // 1024 + 2
    limited = script(tmp_path / "python", f'#!/bin/bash\nulimit -f {blocks}\nexec {sys.executable} "$@"\n')
    lab = make_toy_lab("full", python=str(limited))
    many = toy.llama_bench(n_prompt=tuple(range(1, 2500)))
    error, _ = lab.fail(RemoteError, lab.experiment(bench=(toy.backend_ops(), many)))
    assert os.strerror(27) in error.message
    assert error.next == "dgxlab doctor local"
    assert len(lab.values()) == 2


def test_a_build_goes_on_after_ccache_was_removed(
    make_toy_lab: Callable[..., ToyLab], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = make_toy_lab(root=tmp_path / "root")
    checkout, used = tmp_path / "checkout", tmp_path / "used"
    toy.git(tmp_path, "clone", "-q", str(lab.repository), str(checkout))
    cmake = checkout / "CMakeLists.txt"
    launch = 'set_property(GLOBAL PROPERTY RULE_LAUNCH_COMPILE "${CCACHE}")'
    cmake.write_text(f"{cmake.read_text()}find_program(CCACHE ccache)\nif(CCACHE)\n{launch}\nendif()\n")
    ccache = script(tmp_path / "ccache", f'#!/bin/sh\ntouch {used}\nexec "$@"\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    lab.run_well(lab.experiment(bench=(toy.llama_bench(),), gates=()), tree=checkout)
    assert used.exists()
    ccache.unlink()
    lab.run_well(lab.experiment(bench=(toy.batched_bench(),), gates=()), tree=checkout)


def test_a_build_that_grows_keeps_its_own_programs(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    lab = make_toy_lab(root=tmp_path / "root")
    _, first = lab.run(lab.experiment(bench=(toy.llama_bench(),), gates=()))
    checkout = tmp_path / "checkout"
    toy.git(tmp_path, "clone", "-q", str(lab.repository), str(checkout))
    changed = checkout / "tools" / "llama-bench.c"
    changed.write_text(changed.read_text().replace("20000000", "30000000"))
    _, other = lab.run(lab.experiment(bench=(toy.llama_bench(),), gates=()), tree=checkout)
    _, grown = lab.run(lab.experiment(bench=(toy.batched_bench(),), gates=()))
    first_build, other_build, third_build = (kinds(events, "build")[0] for events in (first, other, grown))
    assert (first_build["build_id"], third_build["reused"]) == (third_build["build_id"], False)
    assert third_build["binaries"].keys() == {"llama-bench", "llama-batched-bench"}
    bench = [build["binaries"]["llama-bench"] for build in (first_build, third_build, other_build)]
    assert bench[0] == bench[1] != bench[2]
