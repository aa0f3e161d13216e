"""Servers through the agent: what becomes of their times in the record, and that none outlives its job."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dgxlab import audit
from dgxlab.errors import RemoteError
from dgxlab.model import EngagedGate
from dgxlab.report import collect, page, query
from tests import toy
from tests.agent.test_child import wait_gone
from tests.lab.conftest import ToyLab, kinds
from tests.lab.test_chain import hold


def test_a_server_is_measured(toy_lab: ToyLab) -> None:
    gates = (EngagedGate("toy-path: on", ("serve",)),)
    experiment = toy_lab.experiment(gates=gates, bench=(toy.serve(env={"TOY_PATH": "1"}),))
    _, events = toy_lab.run_well(experiment)
    *_, run = kinds(events, "run")
    assert run["status"] == "valid"
    assert run["argv"][2:4] == ["drive", "llama-server"]
    (table,) = page(toy_lab.lab.store, query({"form": "serving", "experiment": "toy"})).tables
    assert [row["B"] for row in table.rows] == [1, 2]
    assert all(row["speed_tg.0"].middle > 20 for row in table.rows)  # type: ignore[union-attr]
    assert audit.check(toy_lab.lab.store) == []
    assert toy_lab.run(experiment)[0].job_id == ""  # nothing is measured again


def test_one_failed_stream_costs_its_cell_alone(toy_lab: ToyLab) -> None:
    experiment = toy_lab.experiment(gates=(), bench=(toy.serve(env={"TOY": "500"}),))
    error, events = toy_lab.fail(RemoteError, experiment)
    assert re.search("B2: stream [01]: HTTP 500", error.message)
    *_, run = kinds(events, "run")
    assert run["status"] == "valid"
    assert [run["cells"][result["cell"]]["label"] for result in run["results"]] == ["pp16 tg160 B1"]
    assert audit.check(toy_lab.lab.store) == []
    report = collect(toy_lab.lab.store, "toy")
    assert [(each.labels, each.reason[:10]) for each in report.missing] == [(("pp16 tg160 B2",), "refused in")]
    assert {failure.status for failure in report.failures if failure.kind == "run"} == {"refused"}
    (launch,) = kinds(toy_lab.fail(RemoteError, experiment)[1], "run")[-1:]  # again: what was refused, alone
    assert json.loads(launch["argv"][4])["pl"] == [2]


def test_a_server_that_ends_between_two_waves_is_told_with_its_last_line(toy_lab: ToyLab) -> None:
    outcome, events = toy_lab.run(toy_lab.experiment(gates=(), bench=(toy.serve(env={"TOY": "leaves"}),)))
    assert isinstance(outcome.error, RemoteError)
    assert outcome.error.message == "llama-server: the server ended with status 7: out of toys"
    *_, run = kinds(events, "run")
    assert outcome.error.next == f"dgxlab logs {outcome.job_id} {run['raw']['stderr']['path']}"


@pytest.mark.alone  # its burn-in counts only where other programs leave it the processors
def test_a_session_alternates_servers(toy_lab: ToyLab) -> None:
    entry = toy.serve(streams=(1,), env={"TOY": "untimed"})
    sides = [toy_lab.experiment(name=name, gates=(), bench=(entry,), env={"ARM": name}) for name in ("stock", "other")]
    events, _ = hold(toy_lab, *sides, kind="screen")
    runs = kinds(events, "run")
    assert [run["role"] for run in runs[-3:]] == ["baseline", "candidate", "baseline"]
    assert all(len(run["results"]) == 1 for run in runs)


@pytest.mark.parametrize("how", ["cancelled", "killed"])
def test_no_server_outlives_its_job(toy_lab: ToyLab, locks: Path, how: str) -> None:
    """It shares the job's lock, so that nothing is measured beside it, and dies with the job, however that ends."""
    entry = toy.serve(env={"TOY": "stalls"}, streams=(1,))
    plan = toy_lab.submit(toy_lab.experiment(gates=(), bench=(entry,)))
    toy_lab.wait_for(plan.job_id, '"run:0"')
    server = wait_for_server(toy_lab.root / "jobs" / plan.job_id)
    assert locks in [file.parent for file in open_files(server)]
    if how == "cancelled":
        toy_lab.host.cancel(plan.job_id)
    else:
        toy_lab.kill(plan.job_id)
    toy_lab.wait_end(plan.job_id)
    wait_gone(server)


def open_files(pid: int) -> Iterator[Path]:
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # of a module that it has read
            yield fd.readlink()


def wait_for_server(job: Path) -> int:
    """Return the process id of the job's server, once it is there."""
    while True:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                environment = (folder / "environ").read_bytes()
                words = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if os.fsencode(job.name) in environment and any(word.endswith(b"server.py") for word in words):
                return int(folder.name)


def test_requests_arrive_through_the_agent(toy_lab: ToyLab) -> None:
    """Whether their times count depends on what else the machine does."""
    entry = toy.serve(streams=(), rates=(20.0,), requests=8, axes={"n_parallel": (2,)})
    plan = toy_lab.submit(toy_lab.experiment(gates=(), bench=(entry,)))
    toy_lab.wait_end(plan.job_id)
    (path,) = (toy_lab.root / "jobs" / plan.job_id / "raw").glob("run-0.out")
    server, row = map(json.loads, path.read_text().splitlines())
    assert (server["server"]["slots"], row["rate"]) == (2, 20.0)
    assert [len(wave["streams"]) for wave in row["waves"]] == [8, 8]
    assert all(stream["end"]["prompt"] == 16 for wave in row["waves"] for stream in wave["streams"])
