"""Jobs through a real Slurm on the loopback: two nodes of this machine, this machine as the login node."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.agent.slurm import granted, look
from dgxlab.audit import check
from dgxlab.errors import BuildFailed, Interrupted, JobLost, RemoteError, SpecError
from dgxlab.lab import cluster as clusters
from dgxlab.lab.doctor import Finding, check_host
from dgxlab.lab.jobs import elsewhere, follow
from dgxlab.lab.missing import place
from dgxlab.lab.provision import probe_for
from dgxlab.lab.rebuild import rebuild
from dgxlab.lab.request import Request
from dgxlab.lab.session import Outcome, run
from dgxlab.model import HostEntry, Session
from dgxlab.model import Slurm as Submission
from dgxlab.store import Store
from dgxlab.transport.host import ClusterNode, Host
from dgxlab.transport.local import LocalTransport
from faults.clock import Clock
from tests import machines, toy
from tests.conftest import Bench, Quickstart
from tests.lab.conftest import ToyLab, kinds, leave_at_a_run, notes, quiet
from tests.preload import NO_LOCKS, library, python
from tests.slurm import GPUS, Slurm, slurm

pytestmark = pytest.mark.slurm
Go = Callable[..., ToyLab]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def cluster(running: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """The cluster, idle at first and at last; its programs find it."""
    for name, value in running.env.items():
        monkeypatch.setenv(name, value)
    yield running
    running.tell("scancel", "--user=root", "--signal=KILL", "--full")
    running.tell("scancel", "--user=root")
    running.wait_up()


@pytest.fixture
def go(cluster: Slurm, make_toy_lab: Go) -> Go:
    """Make labs whose host submits to the cluster, with these options."""

    def make(name: str = "lab", root: Path | None = None, python: str = "", **options: Any) -> ToyLab:
        made = make_toy_lab(name, python, root or cluster.folder.parent / "root")  # for jobs killed here
        options = {"partition": "gpu", "gres": "gpu:4", "time": "1:00:00", **options}
        entry = HostEntry("local", path_prepend=(str(Path(sys.executable).parent),), slurm=Submission(**options))
        host = Host(made.host.transport, entry)
        return replace(made, lab=replace(made.lab, connect=lambda name: host), host=host)

    return make


BUSY = ("sbatch", "--parsable", "--job-name=other", "--gres=gpu:4", "--output=/dev/null", "--wrap=sleep 600")


HELD = '#!/bin/sh\nwhile [ -e {hold} ]; do sleep 0.1; done\nexec "$@"\n'


def slow(lab: ToyLab) -> str:
    """Start a job that waits for its release, as a client that is gone then; return its id once it measures."""
    job_id = lab.submit(lab.slow()).job_id
    lab.wait_for(job_id, '"event":"run"')
    return job_id


def rerun(lab: ToyLab) -> Outcome:
    """Run the same, which no longer waits."""
    experiment = lab.slow()
    lab.release()
    return lab.run_well(experiment)[0]


def number_of(cluster: Slurm, job_id: str) -> str:
    """Return the number that Slurm gave a job."""
    return cluster.tell("squeue", "--noheader", "--states=all", f"--name={job_id}", "--format=%i").strip()


def near_its_limit(cluster: Slurm, number: str) -> None:
    """Let a job's limit be so near that Slurm sends TERM, as it does a minute before, or ends the job now."""
    cluster.tell("scontrol", "update", f"jobid={number}", "timelimit=1")
    with suppress(subprocess.CalledProcessError):  # it looks twice a minute, and may have ended it just now
        cluster.tell("scancel", "--batch", "--signal=TERM", number)


def ended(lab: ToyLab, job_id: str) -> str:
    """Wait until a job has ended, and return what Slurm or its final status says."""
    deadline = time.monotonic() + 120  # Slurm looks at limits twice a minute, and may wait half of one before it kills
    while (status := lab.host.status(job_id)).state in ("queued", "running"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return status.slurm or str(status.rc and (status.rc.get("message") or status.rc["status"]))


@contextmanager
def read_in_vain(pipe: Path) -> Iterator[None]:
    """Wait until a job reads a pipe, then let it wait."""
    writer = None
    deadline = time.monotonic() + 60
    while writer is None:
        assert time.monotonic() < deadline
        with suppress(OSError):  # as long as no process reads
            writer = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    try:
        yield
    finally:
        os.close(writer)


def test_a_run_and_what_is_up_to_date(go: Go) -> None:
    lab = go()
    outcome, events = lab.run_well()
    assert outcome.measured == outcome.planned > 0
    job = lab.lab.store.job(outcome.job_id)
    assert job.facts
    granted = job.facts["details"]["slurm"]
    assert granted["partition"] == "gpu"
    assert granted["node"] in ("node1", "node2")
    assert outcome.device.host_id == job.host_id
    assert elsewhere(lab.host, job) == ""  # not another machine, although its node has an id of its own
    assert notes(events, "Slurm job ")
    again, _ = lab.run_well()
    assert (again.job_id, again.reused, again.device) == ("", outcome.planned, outcome.device)


def examined(lab: ToyLab) -> dict[str, Finding]:
    """Return the doctor's findings by name."""
    return {finding.name: finding for finding in check_host(lab.host)}


def test_what_one_node_measured_is_not_up_to_date_on_another(go: Go) -> None:
    first, _ = go("one", nodelist="node1").run_well()
    other = go("two", nodelist="node2")
    second, _ = other.run_well()
    assert second.measured == second.planned
    assert second.device != first.device


def test_what_completes_a_node_runs_on_that_node(go: Go) -> None:
    """Also where another client submits it: its plan names the node, node2, which no job is given first."""
    lab = go()
    assert lab.host.entry.slurm
    there = lab.host.at(replace(lab.host.entry.slurm, nodelist="node2"))
    at_node2 = replace(lab, lab=replace(lab.lab, connect=lambda name: there), host=there)
    part, _ = at_node2.run_well(lab.experiment(bench=(toy.backend_ops(),)))
    request = Request("run", lab.experiment(bench=(toy.backend_ops(), toy.llama_bench())))
    sides = [lab.side(request.experiment)]
    at = place(lab.lab.store, lab.host, request, sides, probe_for(lab.host, *sides), "")
    assert at.job
    assert (at.job.node, at.todo.reused) == ("node2", part.planned)
    lab.lab.store.intend(at.job, lab.host.name, "")  # the client dies before it submits the job
    outcome, _ = lab.run_well(request.experiment)
    assert (outcome.job_id, outcome.reused) == (at.job.job_id, at.todo.planned)
    assert outcome.device == part.device


def test_a_lost_answer_finds_the_job_by_its_name(go: Go, cluster: Slurm) -> None:
    lab = go()
    job_id = slow(lab)
    plan, _ = lab.host.plan(job_id)
    for _ in range(2):
        assert lab.host.submit(plan).state == "running"
    (lab.root / "jobs" / job_id / "slurm.json").unlink()  # cut between sbatch and its answer
    assert len(number_of(cluster, job_id).split()) == 1
    lab.release()
    assert ended(lab, job_id) == "done"


def test_a_job_waits_with_slurms_reason_and_is_cancelled_alone(go: Go, cluster: Slurm) -> None:
    others = [cluster.tell(*BUSY, f"--nodelist={node}").strip() for node in ("node1", "node2")]
    lab = go()
    job_id = lab.submit(lab.experiment()).job_id
    deadline = time.monotonic() + 60
    told = re.compile(r"PENDING \(\w+\), expected at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d, Slurm job \d+$")
    while not told.match((status := lab.host.status(job_id)).slurm):  # its scheduler gives a reason, and then a time
        assert time.monotonic() < deadline
    assert status.state == "queued"
    (listed,) = (job for job in lab.host.jobs() if job.job_id == job_id)
    assert listed.state == "queued"
    assert lab.host.cancel(job_id).state == "done"
    assert ended(lab, job_id) == "cancelled"
    left = cluster.tell("squeue", "--noheader", "--states=PENDING,RUNNING", "--format=%i").split()
    assert sorted(left) == sorted(others)


def test_cancel_ends_a_running_job_and_keeps_what_it_measured(go: Go, cluster: Slurm) -> None:
    lab = go()
    job_id = slow(lab)
    status = lab.host.cancel(job_id)
    assert status.state == "done"
    assert status.rc
    assert status.rc["status"] == "cancelled"
    outcome = rerun(lab)
    assert 0 < outcome.reused < outcome.planned


@pytest.mark.parametrize("how", ["CANCELLED", "PREEMPTED", "TIMEOUT", "FAILED", "NODE_FAIL"])
def test_a_job_that_slurm_ends_says_why_and_the_next_does_what_is_missing(go: Go, cluster: Slurm, how: str) -> None:
    lab = go(nodelist="node1")
    job_id = slow(lab)
    number = number_of(cluster, job_id)
    if how == "CANCELLED":
        cluster.tell("scancel", number)
        assert how in ended(lab, job_id)
    elif how == "PREEMPTED":
        cluster.tell(*BUSY, "--partition=urgent", "--nodelist=node1", "--time=1")
        assert how in ended(lab, job_id)
        cluster.tell("scancel", "--name=other")
    elif how == "TIMEOUT":
        near_its_limit(cluster, number)
        assert how in ended(lab, job_id)
    elif how == "NODE_FAIL":
        cluster.kill("node1")
        try:
            # in this order: a job that ends before its node is down has FAILED
            cluster.tell("scontrol", "update", "nodename=node1", "state=down", "reason=test")
            lab.kill(job_id)
            assert how in ended(lab, job_id)
        finally:
            cluster.start("node1")
            cluster.wait_up()
    else:
        with pytest.raises(subprocess.CalledProcessError):
            cluster.tell("scontrol", "requeue", number)
        lab.kill(job_id)
        assert how in ended(lab, job_id)
    outcome = rerun(lab)
    assert how in lab.lab.store.job(job_id).error
    assert outcome.measured > 0
    assert outcome.reused > 0
    assert outcome.measured + outcome.reused == outcome.planned


@pytest.mark.parametrize(("ahead_s", "how"), [(-240, "TIMEOUT"), (240, "CANCELLED")])
def test_the_clock_of_a_node_is_minutes_off(go: Go, cluster: Slurm, tmp_path: Path, ahead_s: int, how: str) -> None:
    """As much as munge bears: Slurm's times are compared with Slurm's alone."""
    clock = Clock.make(tmp_path / "clock")
    clock.set(ahead_s)
    variables = ",".join(f"{name}={value}" for name, value in clock.env.items())
    lab = go(time="6", extra=(f"--export={variables}",))
    job_id = slow(lab)
    began = json.loads((lab.root / "jobs" / job_id / "started").read_text())["t"]
    assert abs(began - time.time() - ahead_s) < 60
    number = number_of(cluster, job_id)
    if how == "TIMEOUT":
        near_its_limit(cluster, number)
    else:
        cluster.tell("scancel", number)
    assert how in ended(lab, job_id)
    (listed,) = (job for job in lab.host.jobs() if job.job_id == job_id)
    assert 0 <= listed.age_s < 120
    outcome = rerun(lab)
    assert 0 < outcome.reused < outcome.planned


@pytest.mark.slow
def test_slurm_says_what_an_agent_cannot(go: Go, cluster: Slurm) -> None:
    """The job's folder hangs, as a shared file system may, until the limit, which slurmctld checks twice a minute."""
    other = cluster.tell(*BUSY, "--nodelist=node1").strip()
    lab = go(nodelist="node1", extra=("--signal=B:CONT@60",))  # TERM before the limit ends what reads its settings
    job_id = lab.submit(lab.experiment()).job_id
    settings = lab.root / "jobs" / job_id / "slurm.json"
    settings.unlink()
    os.mkfifo(settings)
    cluster.tell("scancel", other)
    with read_in_vain(settings):  # once it runs on its node: a limit that is over before is no TIMEOUT
        # not "now", which slurmctld refuses once the second is over
        cluster.tell("scontrol", "update", f"jobid={number_of(cluster, job_id)}", "EndTime=now+5")
        assert ended(lab, job_id).startswith("TIMEOUT (TimeLimit), Slurm job ")
    with pytest.raises(JobLost, match=r"Slurm on local says TIMEOUT \(TimeLimit\)"):
        follow(lab.lab, lab.host, job_id, quiet)
    (recorded,) = lab.lab.store.rows("SELECT state, error FROM jobs")
    assert recorded["state"] == "lost"
    assert recorded["error"].startswith("Slurm says TIMEOUT (TimeLimit), Slurm job ")
    with Store.open(lab.folder / "again.db") as again:  # from the archive of its files alone
        rebuild(replace(lab.lab, store=again), [], quiet)
        assert again.rows("SELECT state, error FROM jobs") == [recorded]


@pytest.mark.cgroups
def test_a_job_that_takes_more_memory_than_it_asked_for(
    go: Go, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm(tmp_path_factory.mktemp("slurm") / "constrained", constrained=True) as constrained:
        monkeypatch.setenv(*next(iter(constrained.env.items())))
        lab = go(root=constrained.folder.parent / "root", extra=("--mem=10",))
        job_id = lab.submit(lab.experiment()).job_id
        assert ended(lab, job_id).startswith("OUT_OF_MEMORY (OutOfMemory), Slurm job ")
        with pytest.raises(JobLost, match="Slurm on local says OUT_OF_MEMORY"):
            follow(lab.lab, lab.host, job_id, quiet)


def test_slurm_ends_a_program_before_it_tells_the_agent(go: Go, cluster: Slurm) -> None:
    lab = go()
    job_id = slow(lab)
    found: list[int] = []
    deadline = time.monotonic() + 60
    while not found:
        assert time.monotonic() < deadline
        found = list(of_job(job_id, b"/llama-bench"))
    os.kill(found[0], signal.SIGTERM)
    cluster.tell("scancel", number_of(cluster, job_id))
    assert "CANCELLED" in ended(lab, job_id)


def of_job(job_id: str, name: bytes) -> Iterator[int]:
    """Yield the processes of a job that run a program whose path ends in `name`."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            program = (folder / "cmdline").read_bytes().split(b"\0")[0]
            if program.endswith(name) and os.fsencode(job_id) in (folder / "environ").read_bytes():
                yield int(folder.name)


def test_a_preempted_run_goes_on_by_itself(go: Go, cluster: Slurm) -> None:
    lab = go(nodelist="node1")
    sent: list[str] = []

    def preempt(event: dict[str, Any]) -> None:
        if event["event"] == "run" and not sent:
            sent.append(cluster.tell(*BUSY, "--partition=urgent", "--nodelist=node1", "--time=1"))
        elif "PREEMPTED" in event.get("note", ""):
            lab.release()
            cluster.tell("scancel", sent[0].strip())

    outcome, events = lab.run_well(lab.slow(), react=preempt)
    assert notes(events, "a new job does what is missing")
    assert outcome.measured + outcome.reused == outcome.planned
    runs = [event for event in kinds(events, "run") if event["status"] == "valid"]
    cells = [result["cell"] for run in runs for result in run["results"]]
    assert len(cells) == len(set(cells)) == outcome.planned


@pytest.mark.llama
@pytest.mark.usefixtures("cluster")
def test_the_quickstart_cut_and_killed_has_the_rows_of_an_undisturbed_one(
    quickstart: Quickstart, make_bench: Callable[[], Bench]
) -> None:
    """The real llama.cpp: the client goes away at the first run, and the job is killed at the next."""
    bench = make_bench()
    host = Host(LocalTransport(str(bench.root)), HostEntry("local", slurm=Submission(partition="gpu")))
    lab = replace(bench.lab, connect=lambda name: host)
    request = Request("run", replace(quickstart.experiment, gates=()))

    def kill_at_a_run(event: Any) -> None:
        first = lab.store.jobs()[-1]
        if event.event == "run" and first.state == "running":
            started = json.loads((bench.root / "jobs" / first.job_id / "started").read_text())
            os.kill(started["pid"], signal.SIGKILL)

    with pytest.raises(Interrupted):
        run(lab, request, leave_at_a_run)
    assert run(lab, request, kill_at_a_run).error is None
    assert [job.state for job in lab.store.jobs()] == ["done", "lost"]
    rows = """SELECT cell, metric, count(DISTINCT job_id) AS jobs
              FROM samples JOIN runs USING (run_id) JOIN jobs USING (job_id)
              WHERE status = 'valid' AND jobs.name = 'quickstart' GROUP BY cell, metric ORDER BY cell, metric"""
    assert lab.store.rows(rows) == quickstart.bench.lab.store.rows(rows)


def test_a_requeued_job_does_nothing_twice(go: Go, cluster: Slurm) -> None:
    lab = go(extra=("--requeue",))
    job_id = slow(lab)
    number = number_of(cluster, job_id)
    cluster.tell("scontrol", "requeue", number)
    assert "Slurm ended the job" in ended(lab, job_id)
    journal = lab.root / "jobs" / job_id / "journal.jsonl"
    before = journal.read_bytes()
    script = cluster.tell("scontrol", "write", "batch_script", number, "-")
    subprocess.run(["sh"], input=script, text=True, check=True)  # as Slurm does in two minutes
    assert journal.read_bytes() == before


def test_slurmctld_is_away_for_a_while(go: Go, cluster: Slurm) -> None:
    lab = go()
    job_id = slow(lab)
    cluster.kill("slurmctld")
    assert lab.host.status(job_id).state == "running"
    lab.release()
    cluster.start("slurmctld")
    assert ended(lab, job_id) == "done"  # by its journal; slurmctld may not know of its end for minutes


def refused(lab: ToyLab, words: str) -> None:
    """See that a job is refused with these words, and that the doctor says so too."""
    with pytest.raises(RemoteError, match=words):
        lab.run(lab.experiment())
    missing = [finding for finding in check_host(lab.host) if finding.state == "missing"]
    assert any(words in finding.text and finding.next for finding in missing)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"partition": "nope"}, "invalid partition"),
        ({"gres": "gpu:h200:9"}, "node configuration is not available"),
        ({"constraint": "h200"}, "Invalid feature"),
    ],
)
def test_what_slurm_refuses_is_said_in_its_words(go: Go, options: dict[str, str], words: str) -> None:
    refused(go(**options), words)


def test_a_login_node_without_slurm(go: Go, tmp_path: Path) -> None:
    """The doctor names what to change: a login over ssh may have a shorter PATH than its user's shell."""
    lab = go()
    before, bare = os.environ["PATH"], machines.programs(tmp_path / "bare", "git", "cc", "c++", "cmake", "ninja")
    elsewhere = machines.programs(tmp_path / "elsewhere", "sinfo")
    found = Host(lab.host.transport, replace(lab.host.entry, path_prepend=(str(elsewhere),)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(bare))
        (reach,) = check_host(lab.host)
        assert reach.text.startswith("there is no sinfo on the PATH of local")
        assert reach.next.endswith("hosts.yaml")
        (slurm,) = (finding for finding in check_host(found) if finding.name == "slurm")
        assert slurm.text.startswith("there is no sbatch on the PATH of local")
        for name in ("sbatch", "squeue", "srun", "sacct"):
            (elsewhere / name).symlink_to(str(shutil.which(name, path=before)))
        assert "missing" not in {finding.state for finding in check_host(found)}


def test_accounts_and_what_slurmctld_has_forgotten(
    go: Go, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with slurm(tmp_path_factory.mktemp("slurm") / "accounted", accounting=True) as accounted:
        monkeypatch.setenv(*next(iter(accounted.env.items())))
        root = accounted.folder.parent / "root"
        refused(go(root=root, account="nope"), "Invalid account")
        lab = go("member", root=root, account="root")
        assert examined(lab)["sacct"].state == "ok"
        job_id = slow(lab)
        lab.kill(job_id)
        words = ("sacct", "--allocations", "--noheader", f"--name={job_id}", "--format=State")
        deadline = time.monotonic() + 60
        while "FAILED" not in accounted.tell(*words):
            assert time.monotonic() < deadline
        accounted.kill("slurmctld")
        shutil.rmtree(accounted.folder / "state")
        (accounted.folder / "state").mkdir()
        accounted.start("slurmctld")
        accounted.wait_up()
        assert number_of(accounted, job_id) == ""
        assert ended(lab, job_id).startswith("FAILED, Slurm job ")
        assert rerun(lab).reused > 0


def test_a_user_without_sacct(go: Go, tmp_path: Path) -> None:
    """The doctor notes it, and nothing else is the worse for it."""
    lab = go()
    bare = machines.programs(tmp_path / "bare", "git", "cc", "c++", "sbatch", "squeue", "sinfo", "srun")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(bare))
        assert look("forgotten") is None
        said = examined(lab)
    assert said["sacct"].state == "note"
    assert "there is no sacct on the PATH of local" in said["sacct"].text
    assert said["node"].state == "ok"


def test_programs_of_slurm_that_print_a_banner(go: Go, tmp_path: Path) -> None:
    for name in ("sbatch", "squeue", "sinfo", "scontrol", "srun"):
        text = f'#!/bin/sh\necho "*** welcome | to the cluster ***"\nexec {shutil.which(name)} "$@"\n'
        machines.script(tmp_path / "bin" / name, text)
    lab = go()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        outcome, _ = lab.run_well()
        assert outcome.measured == outcome.planned
        assert not [finding for finding in check_host(lab.host) if finding.state == "missing"]


def test_results_of_a_part_of_a_node_are_not_completed(go: Go) -> None:
    """The next job may have other GPUs of it."""
    lab = go()
    facts = lab.host.probe().facts
    with_gpus = replace(facts, details={**facts.details, "gpus": [{"uuid": "GPU-1"}]})
    assert clusters.same_gpus(lab.host, ClusterNode("node1", "idle", facts))
    assert not clusters.same_gpus(lab.host, ClusterNode("node1", "idle", with_gpus))
    assert clusters.same_gpus(go("whole", exclusive=True).host, ClusterNode("node1", "idle", with_gpus))
    assert clusters.same_gpus(go("cpu", gres="").host, ClusterNode("node1", "idle", with_gpus))
    assert not clusters.same_gpus(
        go("gpus", gres="", extra=("--gpus=1",)).host, ClusterNode("node1", "idle", with_gpus)
    )


def test_a_time_limit_that_the_plan_does_not_fit_is_refused(go: Go) -> None:
    lab = go(time="2")
    spec = lab.experiment(session=Session(block_minutes=1.0))
    with pytest.raises(SpecError, match="time of host local is 2"):
        lab.run(spec, "noise", baseline=spec)


@pytest.mark.parametrize("build", [{}, {"partition": "gpu", "time": "30"}])
def test_building_first(go: Go, build: dict[str, str], tmp_path: Path) -> None:
    lab = go(root=tmp_path / "root", build=build)
    outcome, events = lab.run_well()
    assert notes(events, "building first")
    first, second = kinds(events, "build")
    assert not first["reused"]
    assert second["reused"]
    assert outcome.measured == outcome.planned


@pytest.mark.parametrize("asked", [{"kind": "run"}, {"kind": "gate", "again": True}], ids=["run", "gate"])
def test_a_preempted_build_goes_on_by_itself(go: Go, cluster: Slurm, tmp_path: Path, asked: dict[str, Any]) -> None:
    hold, launcher = tmp_path / "hold", tmp_path / "launcher"
    hold.touch()
    machines.script(launcher, HELD.format(hold=hold))
    build = {"partition": "gpu", "nodelist": "node1"} if asked["kind"] == "run" else None  # in the job itself
    lab = go(root=tmp_path / "root", build=build, nodelist="node1")
    sent: list[str] = []

    def preempt(event: dict[str, Any]) -> None:
        if event["event"] == "step" and event["kind"] == "build" and not sent:
            sent.append(cluster.tell(*BUSY, "--exclusive", "--partition=urgent", "--nodelist=node1", "--time=1"))
        elif "PREEMPTED" in event.get("note", ""):
            hold.unlink()
            cluster.tell("scancel", sent[0].strip())

    experiment = lab.experiment(cmake={"CMAKE_C_COMPILER_LAUNCHER": str(launcher)})
    outcome, events = lab.run_well(experiment, react=preempt, **asked)
    assert notes(events, "a new job does what is missing")
    assert outcome.measured == outcome.planned
    assert [gate["status"] for gate in kinds(events, "gate")] == ["passed"]


@pytest.mark.parametrize("build", [{}, {"partition": "gpu"}])
def test_a_build_that_fails_is_the_commands_error(go: Go, build: dict[str, str], tmp_path: Path) -> None:
    lab = go(root=tmp_path / "root", build=build)
    with pytest.raises(BuildFailed) as failed:
        lab.run(lab.experiment(cmake={"CMAKE_BUILD_RPATH_USE_ORIGIN": "OFF"}))
    (job,) = lab.lab.store.rows("SELECT job_id, state FROM jobs")
    assert job["state"] == "failed"
    assert "-build-" in job["job_id"]
    assert failed.value.next
    assert not (lab.root / "nodes").exists()  # what only builds says nothing of a node's GPUs


def test_the_doctor_looks_at_the_cluster(go: Go) -> None:
    lab = go()
    said = examined(lab)
    assert said["nodes"].text == "2 take jobs, 2 of them idle"
    assert "to start at" in said["submit"].text
    assert said["sacct"].state == "note"
    assert re.search(r" \(\S+\) is shared with node node[12], and so are its locks$", said["root"].text)
    assert said["node"].state == "ok"


@pytest.mark.parametrize(
    ("flock", "says"),
    [('shift 4; exec "$@"', ", its locks are not"), ("exit 127", "not known: the node has no flock")],
)
def test_the_doctor_finds_locks_that_do_not_reach_a_node(go: Go, tmp_path: Path, flock: str, says: str) -> None:
    """As on NFS that is mounted with local_lock, where the node can take what is locked here; and without flock."""
    machines.script(tmp_path / "bin" / "flock", f"#!/bin/sh\n{flock}\n")
    lab = go()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        said = examined(lab)
    assert said["root"].text.endswith(says)


def test_a_root_without_locks(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node builds once for two jobs, another builds in a folder of its own; Slurm says which job is dead."""
    root, locks, hold, launcher = (tmp_path / name for name in ("root", "locks", "hold", "launcher"))
    locks.mkdir()
    monkeypatch.setenv("DGXLAB_LOCKS", str(locks))
    env = {"LD_PRELOAD": str(library(tmp_path / "no-locks.so", NO_LOCKS)), "NO_LOCKS": str(root)}
    without = {"root": root, "python": str(python(tmp_path / "python", env)), "gres": ""}
    lab, other = go(nodelist="node1", **without), go("other", nodelist="node2", **without)
    assert examined(lab)["root"].text.endswith(", it has no locks (No locks available)")
    hold.touch()
    machines.script(launcher, HELD.format(hold=hold))
    spec = lab.experiment(cmake={"CMAKE_C_COMPILER_LAUNCHER": str(launcher)})
    jobs = [each.submit(spec).job_id for each in (lab, lab, other)]
    for job_id in jobs:
        lab.wait_for(job_id, '"kind":"build"')
    hold.unlink()
    assert [ended(lab, job_id) for job_id in jobs] == ["done"] * 3
    lines = ((root / "jobs" / job_id / "journal.jsonl").read_text().splitlines() for job_id in jobs)
    *here, there = (each["reused"] for job in lines for each in map(json.loads, job) if each["event"] == "build")
    assert (sorted(here), there) == ([False, True], False)
    assert sorted(path.name.partition("-")[2] for path in (root / "work").iterdir()) == ["node1", "node2"]
    with pytest.raises(RemoteError, match=r"run\.lock cannot be locked: No locks available"):  # Slurm knows no such job
        go("login", build={}, **without).run(spec)
    killed = slow(lab)
    lab.kill(killed)
    assert ended(lab, killed).startswith("FAILED")
    assert rerun(lab).reused > 0


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A disk of 40 MB, which the login node and the nodes share."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m,mode=700", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("killed", [False, True])
def test_a_full_shared_disk(go: Go, small: Path, killed: bool) -> None:
    """The job and a command say so, Slurm's word needs no room, and what was measured is kept."""
    lab = go(root=small / "root")
    job_id = slow(lab)
    with (small / "full").open("wb", buffering=0) as full, suppress(OSError):
        while True:
            full.write(bytes(4096))
    with pytest.raises(RemoteError, match="the disk of local is full"):
        lab.run(lab.experiment())
    lab.kill(job_id) if killed else lab.release()
    assert ended(lab, job_id).startswith("FAILED" if killed else "the job failed: the disk of local is full")
    (small / "full").unlink()
    outcome = rerun(lab)
    assert 0 < outcome.reused < outcome.planned


def test_a_job_on_one_gpu_of_a_node(go: Go, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another job computes on the next GPU: it is no stranger, and nothing that is recorded is of its GPU."""
    folder, uuids = tmp_path / "smi", [f"GPU-{number}" for number in range(GPUS)]
    row = "71, 1980, 3201, 472.33, 99, P0, 580.159.04, 0x0000000000000000, 0, 0, 0, 0"
    machines.sampled(folder, dict.fromkeys(uuids, "NVIDIA H200"), row, watched=uuids[:1])
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    lab = go(gres="gpu:1")
    neighbour = subprocess.Popen(["sleep", "600"])
    (folder / "apps").write_text(f"GPU-1, {neighbour.pid}, /usr/bin/other, 300\n")
    cuda = lab.experiment(cmake={"GGML_CUDA": "ON"}, bench=(toy.llama_bench(n_prompt=(16,), n_gen=(0,)),))
    try:
        outcome, events = lab.run_well(cuda, wait_s=0)
    finally:
        neighbour.kill()
        neighbour.wait()
    assert outcome.device.uuids == ("GPU-0",)
    states = [run[when] for run in kinds(events, "run") for when in ("before", "after")]
    assert {tuple(gpu["uuid"] for gpu in state["gpus"]) for state in states} == {("GPU-0",)}
    assert check(lab.lab.store) == []


@pytest.mark.parametrize(("named", "indices"), [("1", ["1"]), ("GPU-a", ["0"]), ("NoDevFiles", []), ("", ["0", "1"])])
def test_the_gpus_of_a_job(named: str, indices: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_JOB_ID": "1", "SLURMD_NODENAME": "node1", "CUDA_VISIBLE_DEVICES": named}.items():
        monkeypatch.setenv(name, value)
    gpus = [{"index": "0", "uuid": "GPU-a"}, {"index": "1", "uuid": "GPU-b"}]
    assert [gpu["index"] for gpu in granted(gpus)] == indices
