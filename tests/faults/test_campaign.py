"""The campaign itself: a violation is counted and can be seen again, whoever ran it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest

from faults.__main__ import fill, table
from faults.campaign import campaign, trials
from faults.fault import Broken, Fault


@contextmanager
def nowhere() -> Iterator[list[int]]:
    yield []


def dice(place: list[int], random: Random) -> str:
    """Break what must hold on a 6, have a bug on a 1."""
    place.append(thrown := random.randint(1, 6))
    if thrown == 6:
        raise Broken("a six")
    if thrown == 1:
        raise ZeroDivisionError("a one")
    return f"a {thrown}"


def idle(place: list[int], random: Random) -> str:
    time.sleep(5)
    return "never"


DICE = Fault("dice", "a die", 60, "no six", nowhere, dice)


def test_what_breaks_and_what_fails_are_counted() -> None:
    tally = trials(DICE, 1, range(60))
    assert tally.trials == 60 == sum(tally.met.values()) + len(tally.failures)
    assert set(tally.met) == {"a 2", "a 3", "a 4", "a 5"}
    reasons = [failure.reason for failure in tally.failures]
    assert "a six" in reasons
    assert any("ZeroDivisionError: a one" in reason for reason in reasons)


def test_a_failure_is_seen_again_alone() -> None:
    broken = {failure.number for failure in trials(DICE, 1, range(60)).failures}
    assert 0 < len(broken) < 60
    for number in range(60):
        assert len(trials(DICE, 1, [number]).failures) == (number in broken)


def test_workers_change_nothing() -> None:
    alone = trials(DICE, 3, range(60))
    told: list[int] = []
    dealt = campaign([DICE], 3, lambda fault: fault.times, 2, lambda fault, tally: told.append(tally.trials))
    assert dealt["dice"].met == alone.met
    assert sorted(f.number for f in dealt["dice"].failures) == [f.number for f in alone.failures]
    assert sum(told) == 60


def test_a_hang_is_a_failure() -> None:
    slow = Fault("slow", "nothing", 1, "ends", nowhere, idle, limit_s=0.05)
    (failure,) = trials(slow, 1, range(1)).failures
    assert "within 0 s" in failure.reason


def test_table() -> None:
    failed, held = trials(DICE, 1, range(300)), trials(DICE, 1, range(4, 5))
    tables = [table([DICE], {"dice": tally}).splitlines() for tally in (failed, held)]
    rows = [lines[2] for lines in tables]
    assert rows == [f"| `dice` | 300 | {len(failed.failures)} | - |", "| `dice` | 1 | 0 | 100 % |"]
    assert {lines[-1] for lines in tables} == {"- `dice`: a die. Must hold: no six."}


def test_a_document_takes_the_table(tmp_path: Path) -> None:
    path = tmp_path / "doc.md"
    path.write_text("before\n<!-- faults -->\nold\n<!-- /faults -->\nafter\n")
    fill(path, "new\n")
    assert path.read_text() == "before\n<!-- faults -->\nnew\n<!-- /faults -->\nafter\n"
    path.write_text("<!-- faults -->\n")
    with pytest.raises(ValueError, match="has no lines"):
        fill(path, "new\n")
