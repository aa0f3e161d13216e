"""Intents, states, and the questions that a run asks before it measures."""

import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import UsageError
from dgxlab.ingest import ingest
from dgxlab.model import PROTOCOL, Expectation, ParityGate, canonical, case_digest, model_id
from dgxlab.store import Store, alias, gate_digest, matching_ids, only_match
from tests.conftest import PROJECT
from tests.journals import PIN, TINY, Journal, cell, device, env_digest, experiment, intend, plan, source, whole
from tests.store.conftest import measured

ENV = env_digest({"GGML_NO_BACKTRACE": "1"})
MODEL = model_id(TINY)
ASKED = ParityGate("MUL_MAT", "CPU")
GATE = gate_digest(ASKED, {})
LISTED = case_digest(["MUL_MAT(n=1)", "MUL_MAT(n=1)"])
IDS = ["20261120-103000-toy-abc123", "20261120-114500-toy-abc123", "20261121-100000-toy-fade00", "fade00"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        (IDS[0], IDS[:1]),
        ("20261120-11", IDS[1:2]),
        ("20261120", IDS[:2]),
        ("abc123", IDS[:2]),
        ("bc123", []),
        ("fade00", ["fade00"]),  # the whole id of one goes before the alias of another
        ("", IDS),
    ],
)
def test_a_job_by_its_id_its_beginning_or_its_alias(text: str, meant: list[str]) -> None:
    assert matching_ids(IDS, text) == meant


def test_an_alias_of_several_is_refused_with_their_ids() -> None:
    assert only_match(matching_ids(IDS, "20261121"), "20261121") == IDS[2]
    with pytest.raises(UsageError) as error:
        only_match(matching_ids(IDS, alias(IDS[0])), "abc123")
    assert error.value.details.splitlines() == IDS[:2]


def test_an_intent_is_recorded_with_the_whole_plan(store: Store) -> None:
    asked = plan("job-1")
    job = store.intend(asked, "dgx", "0.1.0")
    assert store.job("job-1") == job
    assert (job.state, job.host, job.host_id, job.journal_bytes, job.ended) == ("intended", "dgx", None, 0, False)
    assert (job.plan, job.plan_digest, job.experiment) == (asked, asked.digest, experiment().digest)
    assert abs(job.intent_at - time.time()) < 60
    (row,) = store.rows("SELECT name, spec FROM experiments")
    assert row["name"] == "toy"
    assert "/lab" not in row["spec"]


def test_a_plan_is_read_where_nothing_else_was_imported(tmp_path: Path) -> None:
    """The kinds of gates and of bench entries are declared by the tools."""
    record = shutil.copy(PROJECT / "results.db", tmp_path)
    code = (
        "import sys, pathlib, dgxlab.store as s; print(s.Store.open(pathlib.Path(sys.argv[1])).job(sys.argv[2]).plan)"
    )
    argv = [sys.executable, "-c", code, record, "20261124-133608-h200-gdn-vs-h200-gdn-on-62c963"]
    assert "GreedyGate(" in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_intending_again_changes_nothing(store: Store) -> None:
    first = store.intend(plan("job-1"), "dgx", "0.1.0")
    assert store.intend(plan("job-1", of=experiment(path="/elsewhere/toy.yaml")), "spark", "0.2.0") == first
    with pytest.raises(UsageError, match="job-1 belongs"):
        store.intend(replace(plan("job-1"), kind="ab"), "dgx", "0.1.0")
    assert store.rows("SELECT count(*) AS n FROM jobs, experiments") == [{"n": 1}]


def test_a_job_that_another_client_started(store: Store) -> None:
    assert store.find_job("job-1") is None
    with pytest.raises(UsageError) as caught:
        store.job("job-1")
    assert caught.value.next == "dgxlab sessions"
    without_specs = replace(plan("job-1"), specs=())
    assert store.intend(without_specs, "dgx", "0.1.0").experiment is None
    store.intend(plan("job-2"), "dgx", "0.1.0")
    another = replace(without_specs, job_id="job-3")
    job = store.intend(another, "dgx", "0.1.0", staged=canonical(another))
    assert (job.experiment, job.state) == (experiment().digest, "running")


def test_states_only_go_forward(store: Store) -> None:
    """One that was lost may still turn out done."""
    journal = whole("job-1")
    intend(store, journal)
    assert store.set_state("job-1", "running").state == "running"
    assert store.set_state("job-1", "lost", error="the host rebooted").error == "the host rebooted"
    assert store.set_state("job-1", "running").state == "lost"
    ingest(store, "job-1", journal.lines())
    assert store.job("job-1").state == "done"
    assert store.set_state("job-1", "failed", exit_code=4, error="late") == store.job("job-1")
    assert (store.job("job-1").state, store.job("job-1").exit_code) == ("done", 0)


def test_a_state_keeps_what_the_journal_told(store: Store) -> None:
    journal = Journal(plan("job-1")).job()
    journal.add("error", exit_code=7, message="the build failed", next="less build.log", details="error: x")
    measured(store, journal)
    job = store.set_state("job-1", "failed", exit_code=7)
    assert (job.state, job.exit_code, job.error, job.details) == ("failed", 7, "the build failed", "error: x")


def test_lists_of_jobs(store: Store) -> None:
    """The latest first; unfinished are those of a host whose end is not known."""
    measured(store, whole("job-0"))
    for name, host in (("job-1", "dgx"), ("job-2", "dgx"), ("job-3", "spark"), ("job-4", "dgx")):
        store.intend(plan(name), host, "0.1.0")
    store.set_state("job-1", "running")
    store.set_state("job-4", "lost")
    assert [job.job_id for job in store.unfinished("dgx")] == ["job-2", "job-1"]
    assert [job.job_id for job in store.jobs()] == ["job-4", "job-3", "job-2", "job-1", "job-0"]
    assert store.unfinished("local") == []


def test_up_to_date(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a valid run of the same build, host, protocol, model, environment and cell counts."""
    journal = Journal(plan("job-1")).job().build().model()
    journal.run({512: [1.5]}).run({1024: [2.5]}, status="failed", reason="it crashed", rc=1)
    journal.run({2048: [3.5]}, env={"GGML_X": "1"}).run({4096: [4.5]}, model_id="")
    measured(store, journal)
    build, wanted = journal.build_id(), [(cell(n).key, MODEL, ENV) for n in (512, 1024, 2048, 4096)]
    assert store.up_to_date(build, device(), wanted) == {wanted[0]}
    assert store.up_to_date(build, device(), [(cell(2048).key, MODEL, env_digest({"GGML_X": "1"}))])
    assert store.up_to_date(build, device("host-b"), wanted) == set()
    assert store.up_to_date("another", device(), wanted) == set()
    assert store.up_to_date(build, device(), [(cell(512).key, "", ENV)]) == set()
    assert store.up_to_date(build, device(), [(cell(4096).key, "", ENV)])
    monkeypatch.setattr("dgxlab.store.store.PROTOCOL", PROTOCOL + 1)
    assert store.up_to_date(build, device(), wanted) == set()


def test_gate_passed_is_the_latest_verdict(store: Store) -> None:
    """A pass counts until the gate fails on the same build and host, also in a later job."""
    journal = measured(store, whole("job-1"))
    build = journal.build_id()
    assert store.gate_passed(build, device(), GATE, ASKED)
    assert not store.gate_passed(build, device("host-b"), GATE, ASKED)
    assert not store.gate_passed("another", device(), GATE, ASKED)
    assert not store.gate_passed(build, device(), "another", ASKED)
    store.update_job("job-1", protocol=PROTOCOL - 1)
    assert not store.gate_passed(build, device(), GATE, ASKED)
    store.update_job("job-1", protocol=PROTOCOL)
    measured(store, Journal(plan("job-2"), t=journal.t + 1000).job().build(reused=True).gate(1102))
    assert not store.gate_passed(build, device(), GATE, ASKED)


def test_gate_passed_with_a_count(store: Store) -> None:
    """A pass of another count than is expected now is no pass; a flaky one counts."""
    flaky: dict[str, Any] = {"status": "flaky", "flaky": ["type_a=q4_0,m=16,n=1,k=256"], "failed": [], "reasons": []}
    build = measured(store, Journal(plan("job-1")).job().build().gate(1102, **flaky)).build_id()
    for passed, changes in (
        (True, {"expect": Expectation(1103, 1103), "unsupported": 306}),
        (False, {"expect": Expectation(1104, 1104)}),
        (False, {"unsupported": 305}),
        (False, {"cases": LISTED}),
    ):
        assert store.gate_passed(build, device(), GATE, replace(ASKED, **changes)) is passed


def test_a_gate_with_another_count_does_not_answer(store: Store) -> None:
    """What failed for its expected count alone is no result of a gate that expects another, or what is recorded."""
    journal = measured(store, whole("job-1"))
    wrong = replace(ASKED, expect=Expectation(1104, 1104))
    other = Journal(plan("job-2"), t=journal.t + 1000).job().build(reused=True)
    measured(store, other.gate(gate=wrong, status="failed", reasons=["1103 cases ran, 1104 expected"]))
    for passed, expect in ((True, None), (True, Expectation(1103, 1103)), (False, wrong.expect)):
        assert store.gate_passed(journal.build_id(), device(), GATE, replace(ASKED, expect=expect)) is passed


def test_what_a_gate_says_itself_goes_before_the_record() -> None:
    """Except that the recorded list of cases is that of the recorded count."""
    recorded = (Expectation(1103, 1103), 306, LISTED)
    for said, unsupported, cases in (
        (ASKED, 306, LISTED),
        (replace(ASKED, unsupported=305), 305, LISTED),
        (replace(ASKED, expect=recorded[0]), None, LISTED),
        (replace(ASKED, expect=Expectation(4, 4)), None, ""),
        (replace(ASKED, cases="0" * 16), 306, "0" * 16),
    ):
        gate = said.completed(*recorded)
        assert (gate.expect, gate.unsupported, gate.cases) == (said.expect or recorded[0], unsupported, cases)


def test_gate_digest_is_what_is_checked() -> None:
    asked = ParityGate("MUL_MAT", "CPU", Expectation(1, 1), 3, {"A": "1"}, 9.0)
    assert gate_digest(asked, {}) == GATE
    assert len({GATE, gate_digest(ParityGate("ADD", "CPU"), {}), gate_digest(asked, {"A": "1"})}) == 3


def test_expectation(store: Store) -> None:
    """The first clean gate without a count to reach records it: for its pin, tree, GPUs and what it checks."""
    measured(store, whole("job-1"))
    tree = source().tree
    assert store.expectation(PIN, tree, GATE, "") == (Expectation(1103, 1103), 306, "")
    assert store.expectation(PIN, tree, GATE, "9.0") is None
    assert store.expectation(PIN, tree, gate_digest(ParityGate("MUL_MAT", "CUDA0"), {}), "") is None
    assert store.expectation(PIN, tree, gate_digest(ParityGate("MUL_MAT", "CPU"), {"SHAPES": "full"}), "") is None
    assert store.expectation(PIN, "another", GATE, "") is None


def test_the_list_of_cases_is_part_of_what_later_gates_must_reach(store: Store) -> None:
    """A gate that was told its count, and not its cases, gives them; the record has each list once."""
    told = replace(ASKED, expect=Expectation(1103, 1103))
    listed: dict[str, Any] = {"gate": told, "cases": LISTED, "case_list": ["MUL_MAT(n=1)", "MUL_MAT(n=1)"]}
    journal = Journal(plan("job-1")).job().build().gate().gate(**listed).gate(**listed)
    measured(store, journal)
    assert store.expectation(PIN, source().tree, GATE, "") == (Expectation(1103, 1103), 306, LISTED)
    assert store.case_list(LISTED) == listed["case_list"]
    assert store.case_list("0" * 16) is None
    assert store.gate_passed(journal.build_id(), device(), GATE, replace(told, cases=LISTED))


def test_a_gate_that_the_command_line_changed_is_another_gate(store: Store) -> None:
    weak = replace(ASKED, overridden=True)
    journal = measured(store, Journal(plan("job-1")).job().build().gate(gate=weak))
    assert not store.gate_passed(journal.build_id(), device(), GATE, ASKED)
    assert store.gate_passed(journal.build_id(), device(), gate_digest(weak, {}), weak)
    assert store.rows("SELECT * FROM expectations") == []


def test_rows_only_reads(store: Store) -> None:
    store.intend(plan("job-1"), "dgx", "0.1.0")
    assert store.rows("SELECT host, ? AS x FROM jobs WHERE job_id = ?", (1.5, "job-1")) == [{"host": "dgx", "x": 1.5}]
    with pytest.raises(ValueError, match="only a SELECT"):
        store.rows("DELETE FROM jobs")
    with pytest.raises(sqlite3.OperationalError, match="no such column: hots"):
        store.rows("SELECT hots FROM jobs")
    assert store.set_state("job-1", "running").state == "running"


def test_a_transaction_is_all_or_nothing(store: Store) -> None:
    """What a block wrote before it failed is undone, also what an inner block wrote."""

    def both() -> None:
        with store.transaction():
            store.intend(plan("job-1"), "dgx", "0.1.0")
            store.intend(replace(plan("job-1"), kind="ab"), "dgx", "0.1.0")

    with pytest.raises(UsageError, match="another plan"):
        both()
    assert store.jobs() == []
    assert store.rows("SELECT * FROM experiments") == []
