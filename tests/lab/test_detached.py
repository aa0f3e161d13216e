"""Jobs outlive their client, and are ingested exactly once."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from dgxlab import audit, plan
from dgxlab.agent.job import Job
from dgxlab.errors import AGAIN, Interrupted, JobLost, RemoteError, SpecError
from dgxlab.lab.jobs import INTENT_S, follow, settle
from dgxlab.lab.request import Request, source_of
from dgxlab.lab.session import run
from dgxlab.model import Experiment, Plan, canonical
from dgxlab.store import Locked, Store, connect
from dgxlab.transport.base import HostLost
from dgxlab.transport.host import Host, JobStatus
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.lab.conftest import ToyLab, kinds, leave_at_a_run, notes, quiet
from tests.lab.test_chain import arm


def test_a_locked_record_is_waited_for(toy_lab: ToyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    job, store, notes = toy_lab.submit(toy_lab.experiment()), toy_lab.lab.store, []
    monkeypatch.setattr(connect, "BUSY_S", 0.05)
    with Store.open(store.path) as waiting, Store.open(store.path) as other:
        lab = dataclasses.replace(toy_lab.lab, store=waiting)
        other.connection.execute("BEGIN IMMEDIATE")
        monkeypatch.setattr(connect, "PATIENCE_S", 0.0)
        with pytest.raises(Locked, match=f"; job {job.job_id} goes on") as caught:
            follow(lab, toy_lab.host, job.job_id, quiet)
        assert caught.value.next == f"dgxlab attach {job.job_id}"

        def release(event: Any) -> None:
            if event.event == "note":
                notes.append(event.note)
                other.connection.rollback()

        monkeypatch.setattr(connect, "PATIENCE_S", 60.0)
        assert follow(lab, toy_lab.host, job.job_id, release) is None
    assert (notes[0].startswith(str(store.path)), notes[0].endswith(f"; job {job.job_id} goes on")) == (True, True)
    assert store.job(job.job_id).state == "done"


def other(lab: ToyLab) -> Experiment:
    return lab.experiment(hypothesis="another")


def intend(lab: ToyLab, experiment: Experiment, *, age_s: float = 0.0) -> Plan:
    """Record a job that its client has not submitted yet."""
    source = source_of(lab.lab.cache, experiment, None, quiet)
    job = plan.make(experiment, source, job_id=plan.new_job_id("toy"))
    lab.lab.store.intend(job, lab.host.name, "0")
    lab.lab.store.update_job(job.job_id, intent_at=time.time() - age_s)
    return job


def test_intent_of_another_command_is_left_to_it(toy_lab: ToyLab) -> None:
    job = intend(toy_lab, other(toy_lab))
    settle(toy_lab.lab, toy_lab.host, toy_lab.experiment().digest, quiet)
    with pytest.raises(RemoteError, match=f"job {job.job_id} has not started"):
        follow(toy_lab.lab, toy_lab.host, job.job_id, quiet)
    assert toy_lab.lab.store.job(job.job_id).state == "intended"
    late = intend(toy_lab, other(toy_lab), age_s=INTENT_S + 1)
    settle(toy_lab.lab, toy_lab.host, toy_lab.experiment().digest, quiet)
    assert [toy_lab.lab.store.job(each.job_id).state for each in (job, late)] == ["intended", "lost"]


def test_a_plan_of_another_dgxlab_is_left_to_it(toy_lab: ToyLab) -> None:
    job, told = intend(toy_lab, toy_lab.experiment()), list[str]()
    newer = json.dumps({**json.loads(toy_lab.lab.store.job(job.job_id).plan_json), "urgency": 1})
    toy_lab.lab.store.update_job(job.job_id, plan=newer)
    why = f"the plan of job {job.job_id} was written by dgxlab 0, and this one cannot read it"
    settle(toy_lab.lab, toy_lab.host, other(toy_lab).digest, lambda event: told.append(str(event.note)))
    assert [note.startswith(why) for note in told] == [True]
    with pytest.raises(SpecError, match=why):
        settle(toy_lab.lab, toy_lab.host, toy_lab.experiment().digest, quiet)
    with pytest.raises(SpecError, match=why):
        follow(toy_lab.lab, toy_lab.host, job.job_id, quiet)


def test_a_job_taken_for_lost_is_found_again(toy_lab: ToyLab) -> None:
    slow = toy_lab.slow()
    job = toy_lab.submit(slow)
    toy_lab.lab.store.set_state(job.job_id, "lost")

    with pytest.raises(Interrupted):
        run(toy_lab.lab, Request("run", slow), leave_at_a_run)
    assert toy_lab.lab.store.job(job.job_id).state == "running"
    outcome, _ = toy_lab.run(slow, react=toy_lab.release)
    assert (outcome.error, outcome.job_id, outcome.reused) == (None, job.job_id, 4)
    assert [each.job_id for each in toy_lab.lab.store.jobs()] == [job.job_id]


def test_a_job_below_another_root_is_not_started_again(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> None:
    lab, told = make_toy_lab(), list[str]()
    elsewhere, slow = make_toy_lab("elsewhere", root=tmp_path / "root").host, lab.slow()
    with pytest.raises(Interrupted):
        run(lab.lab, Request("run", slow), leave_at_a_run)
    assert settle(lab.lab, elsewhere, slow.digest, lambda event: told.append(event.note)) == ""
    lab.release()
    (job,) = lab.lab.store.jobs()
    assert (job.state, elsewhere.status(job.job_id).state) == ("running", "absent")
    began, now = f"job {job.job_id} began on {gethostname()} ", f" with the root {elsewhere.transport.root}: "
    assert [(note.startswith(began), now in note) for note in told] == [(True, True)]


def test_a_slow_start_is_no_end(toy_lab: ToyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    toy_lab.run(toy_lab.experiment(bench=(), models={}))
    late = [1, 2]
    on_time = Host.submit

    def submit_late(host: Host, job: Plan) -> JobStatus:
        if not late:
            return on_time(host, job)
        late.pop()
        Job.stage(toy_lab.root / "jobs", job.job_id, canonical(job).encode(), *(toy_lab.root / "agent").iterdir())
        return host.status(job.job_id)

    monkeypatch.setattr(Host, "submit", submit_late)
    outcome, events = toy_lab.run()
    assert (outcome.error, outcome.measured) == (None, 8)
    assert len([event for event in events if event["event"] == "end"]) == 1


def test_a_start_that_never_comes_is_said(toy_lab: ToyLab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "submit", lambda host, job: JobStatus(job.job_id, "staged"))
    with pytest.raises(RemoteError, match="has not started") as caught:
        toy_lab.run()
    assert caught.value.next == AGAIN
    (job,) = toy_lab.lab.store.unfinished("local")
    monkeypatch.undo()
    outcome, _ = toy_lab.run()
    assert (outcome.job_id, outcome.reused) == (job.job_id, 8)


def test_a_staged_job_is_not_lost(toy_lab: ToyLab) -> None:
    job = intend(toy_lab, other(toy_lab), age_s=INTENT_S + 1)
    toy_lab.host.probe()
    Job.stage(toy_lab.root / "jobs", job.job_id, canonical(job).encode(), *(toy_lab.root / "agent").iterdir())
    with pytest.raises(RemoteError, match="has not started"):
        follow(toy_lab.lab, toy_lab.host, job.job_id, quiet)
    settle(toy_lab.lab, toy_lab.host, toy_lab.experiment().digest, quiet)
    assert toy_lab.lab.store.job(job.job_id).state == "intended"


class Broken(LocalTransport):
    """A way to this machine that breaks as often as it is told, before anything arrives."""

    cuts = 0

    def stream(
        self, argv: Sequence[str], stdin: Iterable[bytes] = (), *, patience_s: float | None = None
    ) -> Iterator[bytes]:
        if self.cuts:
            self.cuts -= 1
            raise HostLost("the connection was cut")
        yield from super().stream(argv, stdin, patience_s=patience_s)


def test_a_host_that_answered_is_waited_for(toy_lab: ToyLab) -> None:
    jobs = [intend(toy_lab, other(toy_lab), age_s=INTENT_S + 1) for _ in range(2)]
    way = Broken(str(toy_lab.root))
    host, notes = Host(way), []
    way.cuts = 1
    with pytest.raises(HostLost):
        settle(toy_lab.lab, host, None, lambda event: notes.append(event.note))
    assert notes == []
    host.probe()
    way.cuts = 1
    settle(toy_lab.lab, host, None, lambda event: notes.append(event.note))
    assert [note.partition("; ")[2] for note in notes] == ["trying again in 1 s (1 of 23)"]
    assert {toy_lab.lab.store.job(job.job_id).state for job in jobs} == {"lost"}


def arms(lab: ToyLab) -> tuple[Experiment, Experiment]:
    """Return a baseline and a candidate of half its speed, which goes on until it is released."""
    lab.hold.touch()
    return arm(lab, "stock"), arm(lab, "half", {"TOY_HOLD": str(lab.hold), "TOY": "half"})


def test_a_session_is_followed_by_the_next_command(toy_lab: ToyLab) -> None:
    baseline, candidate = arms(toy_lab)
    job = toy_lab.submit(candidate, baseline)
    toy_lab.wait_for(job.job_id, '"role":"baseline"')
    outcome, events = toy_lab.run_well(candidate, "ab", baseline=baseline, react=toy_lab.release)
    assert outcome.job_id == job.job_id
    assert [job.job_id in note for note in notes(events, "went on without this command")] == [True]
    places = [(run["role"], run["cycle"]) for run in kinds(events, "run")]
    assert len(set(places)) == len(places) >= 4 + 1 + 2 * 6  # cycles on a busy machine may not count, and are added
    assert [row["verdict"] for row in toy_lab.lab.store.verdicts(job.job_id)] == ["slower"]


def test_a_session_of_other_cells_is_another(toy_lab: ToyLab) -> None:
    baseline, candidate = (dataclasses.replace(each, bench=(toy.llama_bench(n_gen=(0,)),)) for each in arms(toy_lab))
    job = toy_lab.submit(candidate, baseline)
    outcome, _ = toy_lab.run_well(candidate, "ab", baseline=baseline, cells=("pp16",), react=toy_lab.release)
    assert outcome.job_id != job.job_id
    counts = [len(toy_lab.lab.store.verdicts(job_id)) for job_id in (job.job_id, outcome.job_id)]
    assert counts == [2, 1]


def test_a_cancelled_session_is_held_again(toy_lab: ToyLab) -> None:
    """Its verdicts are invalid; the next one has the same builds and measures everything itself."""
    baseline, candidate = arms(toy_lab)
    job, store = toy_lab.submit(candidate, baseline), toy_lab.lab.store
    toy_lab.wait_for(job.job_id, '"role":"baseline"')
    toy_lab.host.cancel(job.job_id)
    toy_lab.release()
    outcome, events = toy_lab.run_well(candidate, "ab", baseline=baseline)
    assert (outcome.job_id != job.job_id, store.job(job.job_id).state) == (True, "cancelled")
    verdicts = [[row["verdict"] for row in store.verdicts(job_id)] for job_id in (job.job_id, outcome.job_id)]
    assert verdicts == [["invalid"], ["slower"]]
    assert [build["reused"] for build in kinds(events, "build")][-2:] == [
        True
    ] * 2  # the first are of the cancelled one
    assert audit.check(store) == []


def test_killed_agent_loses_nothing_that_was_measured(toy_lab: ToyLab) -> None:
    experiment = toy_lab.slow()
    job = toy_lab.submit(experiment)
    toy_lab.wait_for(job.job_id, '"event":"run"')
    toy_lab.kill(job.job_id)
    with pytest.raises(JobLost, match="was lost"):
        follow(toy_lab.lab, toy_lab.host, job.job_id, quiet)
    assert len(toy_lab.values()) == 2
    toy_lab.release()
    _, events = toy_lab.run_well(experiment)
    assert [run["tool"] for run in kinds(events, "run")] == ["llama-bench"]
    assert toy_lab.lab.store.job(job.job_id).state == "lost"
