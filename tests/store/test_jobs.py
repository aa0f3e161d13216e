"""Intents, states, and the questions that a run asks before it measures."""

import dataclasses
import sqlite3
import time
from typing import Any

import pytest

from dgxlab.errors import SpecError, UsageError
from dgxlab.ingest import ingest
from dgxlab.model import PROTOCOL, Expectation, ParityGate, case_digest, model_id
from dgxlab.store import Store, gate_digest
from tests.journals import PIN, TINY, Journal, cell, device, env_digest, experiment, intend, plan, source, whole
from tests.store.conftest import measured

ENV = env_digest({"GGML_NO_BACKTRACE": "1"})
MODEL = model_id(TINY)
GATE = gate_digest(ParityGate("MUL_MAT", "CPU"), {})
ASKED = ParityGate("MUL_MAT", "CPU")
LISTED = case_digest(["MUL_MAT(n=1)", "MUL_MAT(n=1)"])


def test_an_intent_is_recorded_with_the_whole_plan(store: Store) -> None:
    """Whatever dies next, the job is known, its plan can be submitted again, and its experiment told."""
    asked = plan("job-1")
    job = store.intend(asked, experiment(), "dgx", "0.1.0")
    assert store.job("job-1") == job
    assert (job.state, job.host, job.host_id, job.journal_bytes, job.ended) == ("intended", "dgx", None, 0, False)
    assert (job.plan, job.plan_digest, job.experiment) == (asked, asked.digest, experiment().digest)
    assert abs(job.intent_at - time.time()) < 60
    (row,) = store.rows("SELECT name, spec FROM experiments")
    assert row["name"] == "toy"
    assert "/lab" not in row["spec"]


def test_intending_again_changes_nothing(store: Store) -> None:
    """A second intent of the same plan is the first one; the id of another plan is refused."""
    first = store.intend(plan("job-1"), experiment(), "dgx", "0.1.0")
    assert store.intend(plan("job-1"), experiment(path="/elsewhere/toy.yaml"), "spark", "0.2.0") == first
    with pytest.raises(UsageError, match="job-1 belongs to another plan"):
        store.intend(dataclasses.replace(plan("job-1"), kind="ab"), experiment(), "dgx", "0.1.0")
    with pytest.raises(ValueError, match="is of experiment"):
        store.intend(plan("job-2"), experiment("other"), "dgx", "0.1.0")
    assert store.rows("SELECT count(*) AS n FROM jobs, experiments") == [{"n": 1}]


def test_a_job_that_another_client_started(store: Store) -> None:
    """Only the plan is known at first; the experiment is filled in when it turns up."""
    assert store.intend(plan("job-1"), None, "dgx", "0.1.0").experiment is None
    assert store.intend(plan("job-1"), experiment(), "dgx", "0.1.0").experiment == experiment().digest


def test_an_unknown_job_is_a_usage_error(store: Store) -> None:
    """The sentence names the job and the command that lists those there are."""
    assert store.find_job("job-9") is None
    with pytest.raises(UsageError, match=r"results\.db knows no job job-9") as caught:
        store.job("job-9")
    assert caught.value.next == "dgxlab jobs"


def test_states_only_go_forward(store: Store) -> None:
    """A job that reported its end is never running or lost again; one that was lost may still turn out done."""
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
    """A job without a last word (full disk) keeps the error that its journal does have."""
    journal = Journal(plan("job-1")).job()
    journal.add("error", exit_code=7, message="the build failed", next="less build.log", details="error: x")
    measured(store, journal)
    job = store.set_state("job-1", "failed", exit_code=7)
    assert (job.state, job.exit_code, job.error, job.details) == ("failed", 7, "the build failed", "error: x")


def test_unfinished_jobs_of_a_host(store: Store) -> None:
    """Those whose end is not known, the latest first, and no other host's."""
    for name, host in (("job-1", "dgx"), ("job-2", "dgx"), ("job-3", "spark"), ("job-4", "dgx")):
        store.intend(plan(name), experiment(), host, "0.1.0")
    store.set_state("job-1", "running")
    store.set_state("job-4", "lost")
    assert [job.job_id for job in store.unfinished("dgx")] == ["job-2", "job-1"]
    assert [job.job_id for job in store.jobs()] == ["job-4", "job-3", "job-2", "job-1"]
    assert [job.job_id for job in store.jobs(states=["lost"])] == ["job-4"]
    assert store.unfinished("local") == []


def test_latest_job_is_one_with_evidence(store: Store) -> None:
    """A job that was only intended is nothing to report."""
    assert store.latest_job() is None
    measured(store, whole("job-1"))
    measured(store, whole("job-2"))
    store.intend(plan("job-3"), experiment(), "local", "0.1.0")
    assert store.latest_job() == store.job("job-2")


def test_up_to_date(store: Store) -> None:
    """Only a valid run of the same build, host, protocol, model, environment and cell counts."""
    journal = Journal(plan("job-1")).job().build().model()
    journal.run({512: [1.5]}).run({1024: [2.5]}, status="failed", reason="it crashed", rc=1)
    journal.run({2048: [3.5]}, env={"GGML_X": "1"})
    measured(store, journal)
    build, wanted = journal.build_id(), [(cell(n).key, MODEL, ENV) for n in (512, 1024, 2048, 4096)]
    assert store.up_to_date(build, device(), wanted) == {wanted[0]}
    assert store.up_to_date(build, device(), [(cell(2048).key, MODEL, env_digest({"GGML_X": "1"}))])
    assert store.up_to_date(build, device("host-b"), wanted) == set()
    assert store.up_to_date("another", device(), wanted) == set()
    assert store.up_to_date(build, device(), wanted, PROTOCOL + 1) == set()
    assert store.up_to_date(build, device(), [(cell(512).key, "", ENV)]) == set()


def test_up_to_date_without_a_model(store: Store) -> None:
    """A run that reads no model is asked for with an empty one."""
    journal = measured(store, Journal(plan("job-1")).job().build().run(model_id=""))
    wanted = (cell(512).key, "", ENV)
    assert store.up_to_date(journal.build_id(), device(), [wanted]) == {wanted}
    assert store.rows("SELECT model_id FROM runs") == [{"model_id": None}]


def test_gate_passed_is_the_latest_verdict(store: Store) -> None:
    """A pass counts until the gate fails on the same build and host, also in a later job."""
    journal = measured(store, whole("job-1"))
    build = journal.build_id()
    assert store.gate_passed(build, device(), GATE, ASKED)
    assert not store.gate_passed(build, device("host-b"), GATE, ASKED)
    assert not store.gate_passed("another", device(), GATE, ASKED)
    assert not store.gate_passed(build, device(), "another", ASKED)
    assert not store.gate_passed(build, device(), GATE, ASKED, PROTOCOL + 1)
    measured(store, Journal(plan("job-2"), t=journal.t + 1000).job().build(reused=True).gate(1102))
    assert not store.gate_passed(build, device(), GATE, ASKED)


def test_gate_passed_with_a_count(store: Store) -> None:
    """A pass of another count than is expected now is no pass; a flaky one counts."""
    flaky: dict[str, Any] = {"status": "flaky", "flaky": ["type_a=q4_0,m=16,n=1,k=256"], "failed": [], "reasons": []}
    journal = measured(store, Journal(plan("job-1")).job().build().gate(1102, **flaky))
    build = journal.build_id()
    assert store.gate_passed(
        build, device(), GATE, dataclasses.replace(ASKED, expect=Expectation(1103, 1103), unsupported=306)
    )
    assert not store.gate_passed(build, device(), GATE, dataclasses.replace(ASKED, expect=Expectation(1104, 1104)))
    assert not store.gate_passed(build, device(), GATE, dataclasses.replace(ASKED, unsupported=305))
    assert not store.gate_passed(build, device(), GATE, dataclasses.replace(ASKED, cases=LISTED))


def test_gate_digest_is_what_is_checked() -> None:
    """The count and the time limit are no part of it; operation, backend and environment are."""
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
    told = ParityGate("MUL_MAT", "CPU", Expectation(1103, 1103))
    listed: dict[str, Any] = {"gate": told, "cases": LISTED, "case_list": ["MUL_MAT(n=1)", "MUL_MAT(n=1)"]}
    journal = Journal(plan("job-1")).job().build().gate().gate(**listed).gate(**listed)
    measured(store, journal)
    assert store.expectation(PIN, source().tree, GATE, "") == (Expectation(1103, 1103), 306, LISTED)
    assert store.case_list(LISTED) == listed["case_list"]
    assert store.case_list("0" * 16) is None
    assert store.gate_passed(journal.build_id(), device(), GATE, dataclasses.replace(told, cases=LISTED))


def test_a_gate_that_the_command_line_changed_is_another_gate(store: Store) -> None:
    """Its pass is none of the spec's gate, and what it counted sets nothing."""
    weak = dataclasses.replace(ASKED, overridden=True)
    journal = measured(store, Journal(plan("job-1")).job().build().gate(gate=weak))
    assert not store.gate_passed(journal.build_id(), device(), GATE, ASKED)
    assert store.gate_passed(journal.build_id(), device(), gate_digest(weak, {}), weak)
    assert store.rows("SELECT * FROM expectations") == []


def test_rows_only_reads(store: Store) -> None:
    """A query sees names and values; one that writes is refused, and the next write works."""
    store.intend(plan("job-1"), experiment(), "dgx", "0.1.0")
    assert store.rows("SELECT host, ? AS x FROM jobs WHERE job_id = ?", (1.5, "job-1")) == [{"host": "dgx", "x": 1.5}]
    with pytest.raises(SpecError, match="cannot be written"):
        store.rows("DELETE FROM jobs")
    with pytest.raises(sqlite3.OperationalError, match="no such column: hots"):
        store.rows("SELECT hots FROM jobs")
    store.set_state("job-1", "running")
    assert store.rows("SELECT state FROM jobs") == [{"state": "running"}]


def test_a_transaction_is_all_or_nothing(store: Store) -> None:
    """What a block wrote before it failed is undone, also what an inner block wrote."""

    def both() -> None:
        with store.transaction():
            store.intend(plan("job-1"), experiment(), "dgx", "0.1.0")
            store.intend(plan("job-2"), experiment("other"), "dgx", "0.1.0")

    with pytest.raises(ValueError, match="is of experiment"):
        both()
    assert store.jobs() == []
    assert store.rows("SELECT * FROM experiments") == []
