"""A lab on this machine around the toy: real git, cmake, ninja, agent and database."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import DgxlabError
from dgxlab.lab import Lab, Side
from dgxlab.lab.jobs import start
from dgxlab.lab.missing import plan_missing
from dgxlab.lab.provision import probe_for
from dgxlab.lab.request import Request, source_of
from dgxlab.lab.session import Outcome, run
from dgxlab.model import Experiment, Plan
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport.host import Host, JobStatus
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.journals import told

Event = dict[str, Any]


def quiet(event: Any) -> None:
    pass


def leave_at_a_run(event: Any) -> None:
    """Press Ctrl-C when the first run is told."""
    if event.event == "run":
        raise KeyboardInterrupt


def is_measured(event: Event) -> bool:
    """Return whether the job begins its first run: it has its device, which it need not when the run's step begins."""
    return event["event"] == "progress" and event["id"] == "run:0" and event["done"] == 1


def undisturbed(events: list[Event]) -> list[Event]:
    """Leave out valid runs that were repeated: on a busy machine any may be, because it shared the processors."""
    last = {(event["id"], *event["cells"]): event for event in events if event["event"] == "run"}
    return [
        event
        for event in events
        if event["event"] != "run"
        or event["status"] != "valid"
        or event.get("chain")
        or event is last[event["id"], *event["cells"]]
    ]


def kinds(events: list[Event], kind: str) -> list[Event]:
    """Return the `undisturbed` events of a kind."""
    return [event for event in undisturbed(events) if event["event"] == kind]


def notes(events: list[Event], word: str) -> list[str]:
    """Return the client's own sentences that have a word in them."""
    return [event["note"] for event in kinds(events, "note") if word in event["note"]]


@dataclass
class ToyLab:
    lab: Lab
    host: Host
    root: Path
    repository: Path
    pin: str
    folder: Path

    def experiment(self, **changes: object) -> Experiment:
        return toy.experiment(self.repository, self.pin, self.folder, **changes)

    @property
    def hold(self) -> Path:
        return self.folder / "hold"

    def slow(self) -> Experiment:
        """Return an experiment with a quick entry and one that goes on until it is released."""
        self.hold.touch()
        entry = toy.llama_bench(n_gen=(0,), env={"TOY_HOLD": str(self.hold)})
        return self.experiment(bench=(toy.backend_ops(), entry))

    def release(self, *_: object) -> None:
        """Let what is slow end; as a `react`, when the first event is seen."""
        self.hold.unlink(missing_ok=True)

    def side(self, experiment: Experiment) -> Side:
        return Side(experiment, source_of(self.lab.cache, experiment, None, quiet))

    def run(
        self,
        experiment: Experiment | None = None,
        kind: str = "run",
        react: Callable[[Event], None] = quiet,
        **options: Any,
    ) -> tuple[Outcome, list[Event]]:
        """Run it; returns how it ended and what was seen; `react` sees each event as it happens."""
        events: list[Event] = []

        def watch(event: Any) -> None:
            events.append(told(event))
            react(events[-1])

        return run(self.lab, Request(kind, experiment or self.experiment(), **options), watch), events

    def run_well(self, *args: Any, **options: Any) -> tuple[Outcome, list[Event]]:
        outcome, events = self.run(*args, **options)
        assert outcome.error is None, outcome.error
        return outcome, events

    def fail(self, kind: type[DgxlabError], *args: Any, **options: Any) -> tuple[DgxlabError, list[Event]]:
        """Run it, and see that it ends with such an error."""
        outcome, events = self.run(*args, **options)
        assert isinstance(outcome.error, kind), outcome.error
        return outcome.error, events

    def submit(self, experiment: Experiment, baseline: Experiment | None = None) -> Plan:
        """Start a job as `run` or `ab` does, and be gone before reading a line of it."""
        request = Request("ab" if baseline else "run", experiment, baseline)
        sides = [self.side(each) for each in request.experiments]
        probe = probe_for(self.host, *sides)
        _, job = plan_missing(self.lab.store, request, sides, probe)
        assert job
        start(self.lab, self.host, job, probe, quiet)
        return job

    def wait_for(self, job_id: str, text: str) -> None:
        journal = self.root / "jobs" / job_id / "journal.jsonl"
        deadline = time.monotonic() + 120
        while text not in (journal.read_text() if journal.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_end(self, job_id: str) -> JobStatus:
        deadline = time.monotonic() + 600  # a session of servers on a busy machine
        while (status := self.host.status(job_id)).state == "running":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return status

    def kill(self, job_id: str) -> None:
        os.kill(json.loads((self.root / "jobs" / job_id / "started").read_text())["pid"], signal.SIGKILL)

    def values(self) -> dict[str, float]:
        """Return the first counted sample of every cell's first metric, by label, from valid runs."""
        rows = self.lab.store.rows(
            """SELECT label, metric, value FROM samples JOIN runs USING (run_id) JOIN cells USING (cell)
               WHERE status = 'valid' AND discarded IS NULL AND metric IN ('avg_ts', 'speed_pp', 'time_us')
               ORDER BY run_id DESC, ordinal DESC"""
        )
        return {str(row["label"]): float(row["value"]) for row in rows}


@pytest.fixture
def make_toy_lab(shared: tuple[Path, Path, str], tmp_path: Path) -> Iterator[Callable[..., ToyLab]]:
    """Make labs; each has a record of its own."""
    repository, shared_root, pin = shared
    opened: list[Store] = []

    def make(name: str = "lab", python: str = "", root: Path = shared_root) -> ToyLab:
        folder = tmp_path / name
        (folder / "patches").mkdir(parents=True)
        store = Store.open(folder / "results.db")
        opened.append(store)
        transport = LocalTransport(str(root))
        transport.python = python or transport.python
        host = Host(transport)
        lab = Lab(store, PinCache(tmp_path / "pins.git"), lambda name: host, folder / "raw")
        return ToyLab(lab, host, root, repository, pin, folder)

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def toy_lab(make_toy_lab: Callable[..., ToyLab]) -> ToyLab:
    return make_toy_lab()


@pytest.fixture
def own(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> ToyLab:
    """A lab whose host is its own."""
    return make_toy_lab(root=tmp_path / "root")
