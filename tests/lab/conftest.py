"""A lab on this machine around the toy: real git, cmake, ninja, agent and database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dgxlab.lab import Lab
from dgxlab.lab.session import Outcome, Request, run
from dgxlab.model import Experiment
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.journals import told


@dataclass
class ToyLab:
    """One record and one host."""

    lab: Lab
    host: Host
    root: Path
    repository: Path
    pin: str
    folder: Path

    def experiment(self, **changes: object) -> Experiment:
        """Return an experiment on the toy."""
        return toy.experiment(self.repository, self.pin, self.folder, **changes)

    def run(
        self, experiment: Experiment | None = None, kind: str = "run", **options: Any
    ) -> tuple[Outcome, list[dict[str, Any]]]:
        """Run it; returns how it ended and what was seen."""
        events: list[dict[str, Any]] = []
        request = Request(kind, experiment or self.experiment(), **options)
        return run(self.lab, request, lambda event: events.append(told(event))), events

    def values(self) -> dict[str, float]:
        """Return the first counted sample of every cell's first metric, by label, from valid runs."""
        rows = self.lab.store.rows(
            """SELECT label, metric, value FROM samples JOIN runs USING (run_id) JOIN cells USING (cell)
               WHERE status = 'valid' AND discarded IS NULL AND metric IN ('avg_ts', 'speed_pp', 'time_us')
               ORDER BY run_id DESC, ordinal DESC"""
        )
        return {str(row["label"]): float(row["value"]) for row in rows}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The toy's repository and a host folder whose builds all tests share."""
    folder = tmp_path_factory.mktemp("toy")
    pin = toy.make_repository(folder / "repository")
    return folder / "repository", folder / "root", pin


@pytest.fixture
def make_toy_lab(shared: tuple[Path, Path, str], tmp_path: Path) -> Iterator[Callable[..., ToyLab]]:
    """Make labs; each has a record of its own."""
    repository, root, pin = shared
    opened: list[Store] = []

    def make(name: str = "lab", python: str = "", **changes: Any) -> ToyLab:
        folder = tmp_path / name
        (folder / "patches").mkdir(parents=True)
        store = Store.open(folder / "results.db")
        opened.append(store)
        transport = LocalTransport(str(changes.get("root", root)))
        transport.python = python or transport.python
        host = Host(transport)
        lab = Lab(store, PinCache(tmp_path / "pins.git"), lambda name: host, folder / "raw")
        return ToyLab(
            lab, host, changes.get("root", root), changes.get("repository", repository), changes.get("pin", pin), folder
        )

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def toy_lab(make_toy_lab: Callable[..., ToyLab]) -> ToyLab:
    """One lab."""
    return make_toy_lab()


@pytest.fixture
def own(make_toy_lab: Callable[..., ToyLab], tmp_path: Path) -> ToyLab:
    """A lab whose host is its own."""
    return make_toy_lab(root=tmp_path / "root")
