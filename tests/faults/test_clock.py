"""Clocks that are set: a small part of the campaign, and what its checks see."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from dgxlab.store.seals import seal_all
from faults.campaign import trials
from faults.clock import Clock
from faults.fault import Broken
from faults.kinds.clock import BENCH, HOUR_S, SET, _clocks, _durations

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
ASK = "import time; print(time.time(), time.monotonic())"


def test_clocks_that_are_set() -> None:
    """An hour back or forward, on either side: all is done once, and took as long as it did."""
    tally = trials(SET, 3, range(2))
    assert tally.failures == []
    assert any("in the journal" in word for word in tally.met)


def test_a_clock_that_is_set(tmp_path: Path) -> None:
    """The time of day moves, also for a program that was started before, and for its own kind; no other clock does."""
    clock = Clock.make(tmp_path)
    clock.set(-HOUR_S)
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-ES', '-c', {ASK!r}])"
    for code in (ASK, nested):
        ran = subprocess.run([clock.python, "-ES", "-c", code], capture_output=True, text=True, check=True)
        now, monotonic = map(float, ran.stdout.split())
        assert now == pytest.approx(time.time() - HOUR_S, abs=60)
        assert monotonic == pytest.approx(time.monotonic(), abs=60)
    code = f"{ASK}; input(); {ASK}"
    with subprocess.Popen(["python3", "-u", "-c", code], env={**os.environ, **clock.env}, text=True, **PIPES) as child:
        before = float(child.stdout.readline().split()[0])
        clock.set(HOUR_S)
        after = float(child.communicate("\n")[0].split()[0])
    assert after - before == pytest.approx(2 * HOUR_S, abs=60)


def test_a_duration_by_the_wrong_clock_is_seen() -> None:
    """An hour more, or less than the program itself took."""
    with _clocks() as place:
        assert place.run("run", place.spec("timed", bench=BENCH), "--host", "box").rc == 0
        _durations(place, "timed")
        for seconds in (HOUR_S, -2 * HOUR_S):
            with place.store() as store:
                (guard,) = store.rows("SELECT name, sql FROM sqlite_schema WHERE sql LIKE '%BEFORE UPDATE ON runs %'")
                store.connection.execute(f"DROP TRIGGER {guard['name']}")
                store.connection.execute("UPDATE runs SET seconds = seconds + ?", (seconds,))
                store.connection.execute(guard["sql"])
                seal_all(store.connection)
            with pytest.raises(Broken, match=r"is said to have taken|is not within"):
                _durations(place, "timed")
