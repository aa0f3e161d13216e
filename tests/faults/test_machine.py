"""The machine of `make faults`, for a minute; and that it finds what is broken on purpose."""

import time
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from dgxlab.lab import clean as cleaning
from faults.desk import Desk, desk
from faults.fault import Broken
from faults.machine import Machine, Modelled

BRIEF = settings(
    max_examples=5,
    stateful_step_count=12,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def place() -> Iterator[Desk]:
    """One desk for all histories."""
    with desk() as whole:
        yield whole


@pytest.fixture
def here(place: Desk, monkeypatch: pytest.MonkeyPatch) -> type[Machine]:
    """The machine at this desk, with its client at home."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, place.box.there.here.env[name])

    class Here(Machine):
        desk: ClassVar[Desk] = place
        met: ClassVar[Counter[str]] = Counter()

    return Here


def test_no_order_of_events_breaks_it(here: type[Machine]) -> None:
    run_state_machine_as_test(here, settings=BRIEF)
    assert here.met["done"] > 0
    assert len(here.met.keys() & {"kill agent", "reboot", "kill client", "fill disk", "cancel", "clean"}) > 2


def finished(machine: Machine) -> Modelled:
    """Submit a job and wait for its end, without recording it."""
    machine.submit(ms=0, how="submit")
    (job,) = machine.jobs
    while machine.desk.job(job.plan).status().state == "running":
        time.sleep(0.02)
    return job


def test_a_job_that_is_removed_before_it_is_kept_is_found(here: type[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = here()
    with machine.ends:
        finished(machine)
        monkeypatch.setattr(cleaning, "_save", lambda lab, host, item, watch: "")
        with pytest.raises(Broken, match="was removed"):
            machine.clean()


def test_a_job_that_runs_again_is_found(here: type[Machine]) -> None:
    machine = here()
    with machine.ends:
        job = finished(machine)
        machine.nothing_goes_back()
        folder = machine.desk.job(job.plan).folder
        for name in ("started", "rc"):
            (folder / name).rename(folder / f"{name}.reserved")
        with pytest.raises(Broken, match="is staged"):
            machine.nothing_goes_back()
        machine.desk.host.submit(job.plan)
        with pytest.raises(Broken, match="the last word of job"):
            machine.teardown()


def test_a_job_that_is_cancelled_before_it_begins(here: type[Machine]) -> None:
    machine = here()
    with machine.ends:
        machine.submit(ms=0, how="stage")
        machine.cancel(0)
        (job,) = machine.jobs
        assert job.may == {"done"}
        machine.teardown()
    assert machine.met["cancelled"] == 1
