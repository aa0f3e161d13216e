"""What several tests of the agent need."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dgxlab.agent import child
from dgxlab.agent.environment import Root
from dgxlab.agent.job import Job
from dgxlab.agent.measure import Workbench
from dgxlab.model import Facts, Plan
from tests.journals import TOOLCHAIN

FACTS = Facts("h", "host", "b", TOOLCHAIN, {"gpus": []})


@pytest.fixture
def root(tmp_path: Path) -> Root:
    empty = Root(tmp_path / "root")
    empty.create()
    return empty


def workplace(folder: Path) -> tuple[Job, Root]:
    job = Job(folder / "jobs" / "J")
    job.raw.mkdir(parents=True)
    return job, Root(folder)


@pytest.fixture
def bench(tmp_path: Path) -> Workbench:
    """The bench of a job on the processor, which has built an arm."""
    bench = Workbench(*workplace(tmp_path), Plan("J", "n", "e", (), ()), FACTS)
    bench.builds["one"] = "B"
    return bench


@pytest.fixture
def adopts() -> Iterator[None]:
    """Make this process the parent of what its programs leave running, as the agent is."""
    child.adopt()
    yield
    child._libc.prctl(child.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
