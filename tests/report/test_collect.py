"""What a report finds: the newest valid run of each cell of one build on one host, and all that is not there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab import plan as planning
from dgxlab.errors import UsageError
from dgxlab.model import (
    BackendOpsBench,
    CheckStep,
    Device,
    FileModel,
    LlamaBench,
    ParityGate,
    PerplexityGate,
    to_json,
)
from dgxlab.report import Quantity, Report, Table, collect, collect_experiment, render
from dgxlab.store import Store
from tests.journals import PIN, facts, source
from tests.report.worlds import GOLDEN, H200, Session, fails, h200, numbers, whole

A, B, C = (f"20261120-10{n}000-h200-{letter}" for n, letter in enumerate("abc"))
BENCH = ("backend-ops", "llama-bench", "batched-bench")
SMALL = h200(gates=(), bench=(LlamaBench("q4k", (512,), (32,)),))


DEVICE = Device.of(to_json(H200), h200().cmake)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Give an empty record."""
    with Store.open(tmp_path / "results.db") as opened:
        yield opened


def form(report: Report, name: str) -> Table:
    """Return the only table of that form."""
    (table,) = (table for table in report.tables if table.form == name)
    return table


def speeds(report: Report) -> dict[str, float]:
    """Return the single-stream medians by test."""
    found = {}
    for row in form(report, "single-stream").rows:
        assert isinstance(row["avg_ts"], Quantity)
        found[str(row["test"])] = row["avg_ts"].median
    return found


def test_everything_of_one_session(store: Store) -> None:
    """Four forms, nothing missing, nothing failed, the origin of each table complete."""
    whole(store, A, tree=source(["backend-ops-shapes"]))
    report = collect(store, "h200")
    assert [table.form for table in report.tables] == ["gates", "ops", "single-stream", "concurrency"]
    assert (report.missing, report.failures) == ((), ())
    for table in report.tables:
        origin = table.provenance
        assert (origin.experiment, origin.sessions, origin.pin, origin.host) == (
            "h200",
            (A,),
            PIN,
            "h200 (h200-7, NVIDIA H200 GPU-1a69cc14)",
        )
        assert [ref.name for ref in origin.series] == ["backend-ops-shapes"]
        assert len(origin.build_id or "") == 16
    synthetic = {table.form: table.provenance.synthetic for table in report.tables}
    assert synthetic == {"gates": (), "ops": (), "single-stream": ("q4k",), "concurrency": ("q4k",)}


def test_the_newest_valid_run_of_a_cell_counts(store: Store) -> None:
    """A newer valid run replaces an older one; a newer failed one does not, and is listed."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    Session(store, SMALL, B).build().runs(numbers(200.0)).end()
    Session(store, SMALL, C).build().runs(ends=fails("llama-bench was killed by SIGKILL")).end("failed", 4)
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0, "tg32": 200.0}
    assert form(report, "single-stream").provenance.sessions == (B,)
    assert report.missing == ()
    lost = [(f.session, f.what, f.status, f.reason, f.again) for f in report.failures]
    assert (C, "llama-bench q4k: pp512, tg32", "failed", "llama-bench was killed by SIGKILL", True) in lost


def test_cells_may_come_from_several_sessions(store: Store) -> None:
    """A second session measured only what was missing; both are named beneath."""
    whole(store, A, wanted=lambda model, env, cell: cell.label != "tg32")
    Session(store, h200(), B, wanted=lambda model, env, cell: cell.label == "tg32").build().runs(numbers(7.0)).end()
    table = form(collect(store, "h200"), "single-stream")
    assert table.provenance.sessions == (A, B)
    assert [row["test"] for row in table.rows] == ["pp512", "pp2048", "tg32"]


def test_another_experiments_run_of_the_same_build_counts(store: Store) -> None:
    """The run that makes a cell up to date is the run that the report shows, whoever asked for it."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    other = dataclasses.replace(SMALL, name="other")
    report = collect_experiment(store, other, source(), DEVICE)
    assert report.title == "Experiment other"
    assert speeds(report) == {"pp512": 100.0, "tg32": 100.0}
    assert form(report, "single-stream").provenance.sessions == (A,)
    assert (report.missing, report.failures) == ((), ())


def test_a_machine_is_the_same_under_another_name(store: Store) -> None:
    """What makes a cell up to date is in the report, whatever the host was called when it measured."""
    Session(store, SMALL, A, host_name="box").build().runs(numbers(100.0)).end()
    named = dataclasses.replace(SMALL, host="spark")
    assert speeds(collect_experiment(store, named, source(), DEVICE)) == {"pp512": 100.0, "tg32": 100.0}
    Session(store, SMALL, B, wanted=lambda model, env, cell: cell.label == "pp512").build().runs(numbers(200.0)).end()
    assert speeds(collect(store, "h200")) == {"pp512": 200.0, "tg32": 100.0}


def test_what_nobody_asked_for_is_not_listed_as_failed(store: Store) -> None:
    """Another experiment's crash of the same build, in an environment of its own, is no failure of this one."""
    broken = dataclasses.replace(SMALL, name="broken", env={"TOY": "crash"})
    Session(store, broken, A).build().runs(ends=fails("it was killed by SIGSEGV")).end()
    Session(store, SMALL, B).build().runs(numbers(100.0)).end()
    assert collect(store, "h200").failures == ()
    (failure, *_) = collect(store, "broken").failures
    assert "SIGSEGV" in failure.reason


@pytest.mark.parametrize("what", ["tree", "cmake", "host", "toolchain", "protocol", "env", "recipe"])
def test_what_differs_is_never_mixed_in(store: Store, what: str) -> None:
    """An older run under other conditions fills no gap of the newest session: the cell is missing."""
    older, newer = {}, {}
    first = second = SMALL
    if what == "tree":
        older = {"tree": source(["w4a16"])}
    if what == "cmake":
        first = dataclasses.replace(SMALL, cmake={"GGML_CUDA": "ON"})
    if what == "host":
        older = {"host": facts("host-gb10", "spark"), "host_name": "dgx"}
    if what == "toolchain":
        there = facts("host-h200", "h200-7")
        older = {"host": dataclasses.replace(there, toolchain=dataclasses.replace(there.toolchain, cxx="g++ 14"))}
    if what == "env":
        first = dataclasses.replace(SMALL, env={"GGML_CUDA_W4A16": "1"})
    if what == "recipe":
        first = dataclasses.replace(SMALL, models={"q4k": dataclasses.replace(h200().models["q4k"], seed=1)})
    Session(store, first, A, **older).build().runs(numbers(100.0)).end()
    if what == "protocol":
        store.update_job(A, protocol=0)
    newer_session = Session(store, second, B, wanted=lambda model, env, cell: cell.label == "pp512", **newer)
    newer_session.build().runs(numbers(200.0)).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0}
    assert [(m.tool, m.model, m.labels, m.reason) for m in report.missing] == [
        ("llama-bench", "q4k", ("tg32",), "not measured")
    ]


def test_two_models_with_the_same_tests_stay_apart(store: Store) -> None:
    """Cells are alike, models are not: a file is known by its path, a recipe by itself."""
    models = {"big": FileModel("~/bench/Qwen3-32B-Q4_K_M.gguf"), "q4k": h200().models["q4k"]}
    experiment = dataclasses.replace(SMALL, models=models, bench=(LlamaBench("big", (512,), ()), *SMALL.bench))
    session = Session(store, experiment, A).build()
    session.runs(lambda step: numbers(50.0 if step.model == "big" else 900.0)(step)).end()
    rows = form(collect(store, "h200"), "single-stream").rows
    medians = [(row["model"], row["test"], row["avg_ts"].median) for row in rows]  # type: ignore[union-attr]
    assert medians == [("big", "pp512", 50.0), ("q4k", "pp512", 900.0), ("q4k", "tg32", 900.0)]


def test_a_file_that_changed_is_another_model(store: Store) -> None:
    """The same path with other content: the older content's numbers do not fill in."""
    experiment = dataclasses.replace(SMALL, models={"q4k": FileModel("~/m.gguf")})
    for job, identity, value, cells in ((A, "file-old", 100.0, ("pp512", "tg32")), (B, "file-new", 200.0, ("pp512",))):
        session = Session(store, experiment, job, wanted=lambda model, env, cell, cells=cells: cell.label in cells)  # type: ignore[misc]
        session.journal.build("h200")
        for step in session.plan.steps:
            if step.kind == "model":
                session.model(step, model_id=identity)  # type: ignore[arg-type]
        session.runs(numbers(value), model_id=identity).end()
    report = collect(store, "h200")
    assert speeds(report) == {"pp512": 200.0}
    assert [missing.labels for missing in report.missing] == [("tg32",)]


def test_a_session_shows_only_its_own(store: Store) -> None:
    """An old session's report does not change when newer ones come; its own plan says what it should have."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    before = collect(store, job_id=A)
    session = Session(store, SMALL, B, wanted=lambda model, env, cell: cell.label == "pp512")
    session.build().runs(numbers(200.0)).end()
    assert collect(store, job_id=A) == before
    assert speeds(before) == {"pp512": 100.0, "tg32": 100.0}
    only = collect(store, job_id=B)
    assert (only.title, only.hypothesis) == (f"Session {B}", "stock MMQ is bound by weights up to n=8")
    assert (speeds(only), only.missing) == ({"pp512": 200.0}, ())


# -- gates ------------------------------------------------------------------------------------------------------------


def test_gates_show_the_newest_and_list_every_failure(store: Store) -> None:
    """It failed, then it passed: the table says passed, the failure stays with its reason and cases."""
    failing = (GOLDEN.parent / "cpu" / "tbo-test-failing.txt").read_text()
    reasons = {
        "status": "failed",
        "reasons": ["2 of 1103 cases failed"],
        "failed": ["n=1", "n=2", "n=3", "n=4"],
        "rc": 1,
    }
    session = Session(store, h200(), A).build().gates(failing.replace("CPU", "CUDA0"), **reasons)
    error = "gate MUL_MAT on CUDA0 failed for h200: 2 of 1103 cases failed"
    session.journal.add("error", exit_code=5, message=error, next="", details="")
    session.end("failed", 5)
    first = collect(store, "h200")
    assert [row["status"] for row in form(first, "gates").rows] == ["failed"]
    (failure,) = first.failures
    assert failure.reason == "2 of 1103 cases failed; n=1; n=2; n=3; and 1 more"
    assert not failure.again
    assert {missing.reason for missing in first.missing} == {"not measured"}
    whole(store, B)
    report = collect(store, "h200")
    (row,) = form(report, "gates").rows
    assert (row["status"], row["count"], row["passed"], row["unsupported"]) == ("passed", "1103/1103", 1103, 306)
    assert [(f.session, f.what, f.again) for f in report.failures] == [(A, "gate MUL_MAT on CUDA0", True)]


def test_a_gate_that_was_not_run_says_so(store: Store) -> None:
    """Its row has no numbers, and no 0."""
    Session(store, h200(), A).build().runs().end()
    (row,) = form(collect(store, "h200"), "gates").rows
    assert dict(row) == {"op": "MUL_MAT", "backend": "CUDA0", "status": "not run"}


def test_gates_tell_recorded_expected_and_flaky_apart(store: Store) -> None:
    """The first clean gate recorded the count; a flaky case is named; an environment is a column."""
    gates = (ParityGate("MUL_MAT", "CUDA0"), ParityGate("MUL_MAT", "CUDA0", env={"GGML_CUDA_W4A16": "1"}))
    experiment = h200(gates=gates, bench=(BackendOpsBench("MUL_MAT", "CUDA0", {"n": (1,)}),))
    Session(store, experiment, A).build().gates(status="flaky", flaky=["type_a=q4_0,n=1"]).end()
    Session(store, experiment, B).build().gates().end()
    table = form(collect(store, "h200"), "gates")
    assert [column.key for column in table.columns][:4] == ["op", "backend", "env", "count"]
    assert [row["expected"] for row in table.rows] == ["1103, recorded here", "1103, recorded here"]
    older = form(collect(store, job_id=A), "gates")
    assert [(row["status"], row["flaky"], row["expected"]) for row in older.rows] == [
        ("flaky", "type_a=q4_0,n=1", None),
        ("flaky", "type_a=q4_0,n=1", None),
    ]


def test_a_gate_without_a_summary_has_dashes(store: Store) -> None:
    """A crash before the summary: no count was read, none is shown."""
    changes = {"passed": None, "total": None, "unsupported": None, "status": "failed", "reasons": ["no summary"]}
    Session(store, h200(), A).build().gates(**changes).end("failed", 5)
    assert "| MUL_MAT | CUDA0 | –/– | – | 1103 | failed | – |" in render(collect(store, "h200"))  # noqa: RUF001


def test_a_gate_that_is_not_asked_for_is_no_failure_here(store: Store) -> None:
    """Another experiment's on the same build; the same gate is evidence of the build, whoever ran it."""
    failed = {"passed": 1101, "status": "failed", "rc": 1, "reasons": ["2 of 1103 cases failed"]}
    stricter = (*h200().gates, ParityGate("MUL_MAT", "CUDA0", env={"GGML_CUDA_FORCE_MMQ": "1"}))
    Session(store, h200(name="stricter", gates=stricter[1:]), A).build().gates(**failed).end("failed", 5)
    whole(store, B)
    assert collect(store, "h200").failures == ()
    assert [failure.what for failure in collect(store, "stricter").failures] == ["gate MUL_MAT on CUDA0"]
    Session(store, h200(name="same"), C).build().gates(**failed).end("failed", 5)
    report = collect(store, "h200")
    assert [(failure.session, failure.what) for failure in report.failures] == [(C, "gate MUL_MAT on CUDA0")]
    assert [row["status"] for row in form(report, "gates").rows] == ["failed"]


def test_a_check_that_is_not_asked_for_is_no_failure_here(store: Store) -> None:
    """The same of gates on models."""
    asked = PerplexityGate("q4k", "q4k", env={"FAST": "1"}, against={"FAST": None}, kld_ratio_at_most=0.5)
    other = dataclasses.replace(asked, kld_ratio_at_most=0.1)
    for job, name, gate, status in ((A, "other", other, "failed"), (B, "h200", asked, "passed")):
        session = Session(store, h200(name=name, gates=(gate,), bench=SMALL.bench), job).build()
        (step,) = (step for step in session.plan.steps if isinstance(step, CheckStep))
        session.journal.check(id=step.id, gate=gate, arm=name, env=dict(step.env), status=status)
        session.runs(numbers(100.0)).end()
    assert collect(store, "h200").failures == ()
    assert len(collect(store, "other").failures) == 1


# -- what is not there ------------------------------------------------------------------------------------------------


def test_runs_that_do_not_count_are_listed_with_their_reason(store: Store) -> None:
    """Failed and discarded; their cells are missing with that reason; many cells are counted, not spelled out."""
    session = Session(store, h200(), A).build().gates()
    session.runs(ends=fails("test-backend-ops printed nothing"), only=["backend-ops"])
    session.runs(ends=fails("'w4a16:' is not on stderr", "discarded"), only=["llama-bench"])
    session.journal.add("error", exit_code=4, message="test-backend-ops printed nothing", next="", details="")
    session.runs(only=["batched-bench"]).end("failed", 4)
    report = collect(store, "h200")
    listed = {failure.what: (failure.status, failure.reason) for failure in report.failures}
    assert listed == {
        "llama-bench q4k: pp512, pp2048, tg32": ("discarded", "'w4a16:' is not on stderr"),
        "backend-ops: MUL_MAT type_a=q4_0 m=4096 n=1 k=14336, MUL_MAT type_a=q4_0 m=4096 n=8 k=14336, "
        "MUL_MAT type_a=q4_0 m=4096 n=512 k=14336, and 3 more": ("failed", "test-backend-ops printed nothing"),
    }
    assert {(m.tool, len(m.labels), m.reason) for m in report.missing} == {
        ("backend-ops", 6, f"failed in {A}"),
        ("llama-bench", 3, f"discarded in {A}"),
    }
    assert [table.form for table in report.tables] == ["gates", "concurrency"]


@pytest.mark.parametrize(
    ("state", "status", "reason"),
    [
        ("intended", "intended", "recorded, and nothing has been heard from the host yet"),
        ("lost", "lost", "the host was rebooted"),
        ("failed", "failed", "host h200 cannot be reached"),
    ],
)
def test_a_session_that_never_began(store: Store, state: str, status: str, reason: str) -> None:
    """Every cell is missing, the gate was not run, and why is said."""
    store.intend(planning.make(h200(), source(), job_id=A), h200(), "h200", "0.1.0")
    if state != "intended":
        store.set_state(A, state, error=reason)
    report = collect(store, "h200")
    assert sum(len(missing.labels) for missing in report.missing) == 12
    assert {missing.reason for missing in report.missing} == {
        "the session has not ended" if state == "intended" else "not measured"
    }
    assert [(f.session, f.what, f.status, f.reason) for f in report.failures] == [(A, "session", status, reason)]
    assert [table.form for table in report.tables] == ["gates"]
    assert form(report, "gates").provenance.build_id is None


def test_an_error_that_nothing_else_explains_is_listed(store: Store) -> None:
    """A run failed, and then the disk was full: two lines."""
    session = Session(store, SMALL, A).build().runs(ends=fails("llama-bench printed nothing"))
    session.journal.add("error", exit_code=4, message="the disk is full", next="df -h", details="")
    session.end("failed", 4)
    listed = [(failure.what, failure.reason) for failure in collect(store, "h200").failures]
    assert listed == [
        ("session", "the disk is full"),
        ("llama-bench q4k: pp512, tg32", "llama-bench printed nothing"),
    ]


def test_a_running_session_is_said_to_be_running(store: Store) -> None:
    """Half of a report is marked as half."""
    Session(store, h200(), A).build().gates().runs(only=["backend-ops"]).save()
    report = collect(store, "h200")
    assert {missing.reason for missing in report.missing} == {"the session has not ended"}
    assert [(f.what, f.status, f.reason) for f in report.failures] == [("session", "running", "it has not ended")]


def test_an_unreachable_host_does_not_hide_older_results(store: Store) -> None:
    """The newest session failed before it began; what the same tree gave earlier is shown, and the failure too."""
    whole(store, A)
    Session(store, h200(), B)
    store.set_state(B, "failed", error="host h200 cannot be reached", exit_code=3)
    report = collect(store, "h200")
    assert len(report.tables) == 4
    assert report.missing == ()
    assert [(f.session, f.status, f.reason) for f in report.failures] == [(B, "failed", "host h200 cannot be reached")]


# -- names, versions, JSON --------------------------------------------------------------------------------------------


def test_wrong_names_are_usage_errors(store: Store) -> None:
    """The nearest experiment is named; an unknown session is too; one of both must be given."""
    Session(store, SMALL, A).build().end()
    with pytest.raises(UsageError, match="no session of an experiment 'h20'; there is 'h200'") as caught:
        collect(store, "h20")
    assert caught.value.next == "dgxlab report h200"
    with pytest.raises(UsageError, match="no session of an experiment 'zzz'"):
        collect(store, "zzz")
    with pytest.raises(UsageError, match="knows no job"):
        collect(store, job_id="nope")
    for wrong in ({}, {"experiment": "h200", "job_id": A}):
        with pytest.raises(UsageError, match="one experiment or one session"):
            collect(store, **wrong)


def test_a_spec_of_another_dgxlab_falls_back_to_the_plan(store: Store) -> None:
    """The experiment has fields that this version does not know: the session's plan says what was asked."""
    Session(store, SMALL, A).build().runs(numbers(100.0)).end()
    (row,) = store.rows("SELECT digest, spec FROM experiments")
    changed = json.dumps({**json.loads(row["spec"]), "new_field": 1})
    store.connection.execute("UPDATE experiments SET spec = ?", (changed,))
    assert speeds(collect(store, "h200")) == {"pp512": 100.0, "tg32": 100.0}


def test_a_plan_of_another_dgxlab_is_refused_in_words(store: Store) -> None:
    """No traceback: which dgxlab wrote it."""
    Session(store, SMALL, A).build().end()
    (row,) = store.rows("SELECT plan FROM jobs")
    store.update_job(A, plan=json.dumps({**json.loads(row["plan"]), "new_field": 1}))
    with pytest.raises(UsageError, match=f"plan of session {A} was written by dgxlab 0.1.0 and cannot be read"):
        collect(store, job_id=A)


def test_the_json_twin_has_the_numbers(store: Store) -> None:
    """Raw medians, spreads and counts in stored units, null for what is missing; plain JSON."""
    whole(store, A)
    report = json.loads(json.dumps(to_json(collect(store, "h200")), allow_nan=False))
    (ops,) = (table for table in report["tables"] if table["form"] == "ops")
    alone = {"n": 1, "spread": None, "of": "samples"}
    assert ops["rows"][0] == {
        "type_a": "q4_0",
        "m": 4096,
        "n": 1,
        "k": 14336,
        "time_us": {"metric": "time_us", "unit": "us", "median": 14.388455, **alone},
        "flops": {"metric": "flops", "unit": "FLOPS", "median": 8162135152842.867, **alone},
    }
    assert ops["provenance"]["sessions"] == [A]
