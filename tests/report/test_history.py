"""Histories: which sessions are one, what their numbers are, and how often a change of level is seen or imagined."""

import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dgxlab import plots
from dgxlab.errors import UsageError
from dgxlab.plots import history as drawing
from dgxlab.report import history as histories
from dgxlab.report import page, query, render_page
from dgxlab.report.history import ALPHA, LEAST, change_points
from dgxlab.report.records import Page, Table
from dgxlab.store import Store
from tests.conftest import PROJECT
from tests.journals import THROTTLED, source
from tests.report.worlds import Session, h200, numbers, session_of_two, whole

NOISE = (0.0, 0.6, -0.4, 0.3, -0.7, 0.5)
EARLIER = [100 + each for each in NOISE]
LATER = [106 - each for each in NOISE]


def measured(store: Store, values: Sequence[float], first: int = 0, name: str = "h200", **tree: str) -> None:
    """Record a session of an experiment for each value, all of one tree."""
    made = replace(source(), **tree)
    for number, value in enumerate(values, first):
        session = Session(store, h200(name=name), f"20261120-103000-{chr(97 + number)}", tree=made)
        session.build().runs(numbers(value, 3)).end()


def of(store: Store, cells: str = "pp512", **words: str) -> Page:
    return page(store, query({"form": "history", "cells": cells, **words}))


def only(found: Page) -> Table:
    (table,) = found.tables
    return table


def test_a_step_is_found_where_it_is_with_what_changed_there(store: Store, tmp_path: Path) -> None:
    """The experiment has another name at the later pin: patches, flags, model and host are the same."""
    measured(store, EARLIER)
    measured(store, LATER, 6, "h200-oct", pin="c" * 40)
    table = only(of(store))
    assert table.title == "pp512: h200, h200-oct"
    assert [row["value"].middle for row in table.rows] == [value + 1 for value in EARLIER + LATER]
    assert [row["change"] for row in table.rows if row["change"]] == ["+5.6 %"]
    assert [row["level"] for row in table.rows] == [pytest.approx(101.15)] * 6 + [pytest.approx(106.85)] * 6
    change = table.rows[6]
    assert (change["pin"], change["change_pct"]) == ("c" * 12, pytest.approx(5.6, abs=0.4))
    assert 0 < change["p"] < ALPHA
    assert table.notes[0] == "since 3000-g +5.6 % (p 0.002); new there: experiment, pin"
    assert "dgxlab ab judges" in table.notes[1]
    text = render_page(of(store))
    assert "| 3000-g | " in text
    assert "| +5.6 % |" in text
    assert text == render_page(of(store))
    drawn = drawing.figure(of(store).tables)
    (axes,) = drawn.axes
    assert [text.get_text().strip() for text in axes.texts] == ["+5.6 %"]
    assert [entry.get_text() for entry in drawn.legends[0].get_texts()] == ["pin e3a74b299085", "pin cccccccccccc"]
    assert plots.write(drawn, tmp_path / "history.png").is_file()


def test_few_sessions_show_no_change_and_say_so(store: Store) -> None:
    measured(store, [100, 100, 100, 200, 200, 200])
    table = only(of(store))
    assert [row["change"] for row in table.rows] == [None] * 6
    assert table.notes == ("6 of 8 sessions: fewer than 8 cannot tell a change from chance",)
    assert "change" not in [column.key for column in table.columns]


def test_a_steady_history_says_that_it_is_one(store: Store) -> None:
    measured(store, [*EARLIER, *EARLIER])
    assert only(of(store)).notes == ("no change of level that one in 20 random orders would not show as well",)


def test_other_patches_flags_models_and_hosts_are_other_histories(store: Store) -> None:
    measured(store, [100, 101])
    for number, changes in enumerate(({"series": ("w4a16",)}, {"cmake": {"GGML_CUDA": "ON"}}, {"env": {"A": "1"}})):
        other, tree = h200(name=f"other-{number}", **changes), source(changes.get("series", ()))
        Session(store, other, f"20261120-1100{number}", tree=tree).build().runs(numbers()).end()
    found = of(store)
    assert [table.title for table in found.tables] == ["pp512: h200"]
    assert found.summary == "3 more with a single session"
    assert [len(only(of(store, experiment=f"other-{number}")).rows) for number in range(3)] == [1, 1, 1]
    assert len(of(store, "n=8").tables) == 2  # two types
    assert {table.settings["series"] for table in of(store).tables} == {"none"}


def test_chains_count_once_a_session_and_what_does_not_count_is_not_there(store: Store) -> None:
    whole(store)
    two = session_of_two(store, "20261121-103000-h200-vs-w4a16-b").build().gates()
    two.chains(lambda step, role, cycle: 9.0 if role == "burn-in" else 100.0 + cycle).gates(after=True).end()
    Session(store, h200(), "20261122-103000-dirty", tree=source(dirty=True)).build().runs(numbers()).end()
    table = only(of(store, experiment="h200"))
    assert [(row["session"], row["value"].n, row["value"].of) for row in table.rows] == [
        ("20261120-103000-h200-a", 4, "samples"),
        ("20261121-103000-h200-vs-w4a16-b", 10, "runs"),
    ]
    assert table.rows[1]["value"].middle == 104.5
    baselines = "SELECT run_id FROM measurements WHERE role = 'baseline' AND label LIKE 'pp512%'"
    store.put("flags", {**store.rows(baselines)[0], **THROTTLED})
    assert only(of(store, experiment="h200")).rows[1]["value"].n == 9
    store.put("rejections", {"job_id": "20261121-103000-h200-vs-w4a16-b", "reason": "a trial", "at": 0.0})
    assert len(only(of(store, experiment="h200")).rows) == 1


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({}, "form=history needs cells"),
        ({"cells": "pp511"}, "no cell of the record has all of 'pp511'"),
        ({"cells": "pp512", "experiment": "h201"}, "no session of an experiment 'h201'; there is 'h200'"),
        ({"cells": "pp512", "model": "none"}, "no such cell was measured there"),
        ({"cells": "pp512", "session": "x"}, "form=history takes no key 'session'"),
    ],
)
def test_what_cannot_be_shown(store: Store, words: dict[str, str], error: str) -> None:
    measured(store, [100])
    with pytest.raises(UsageError) as raised:
        page(store, query({"form": "history", **words}))
    assert error in str(raised.value)


def test_cells_whose_runs_do_not_count_are_not_said_to_be_unmeasured(store: Store) -> None:
    disturbed = Session(store, h200(), "20261120-103000-h200-a").build()
    disturbed.runs(numbers(), flags=[THROTTLED]).end()
    with pytest.raises(UsageError) as raised:
        of(store)
    assert str(raised.value) == "every run of such a cell there had a hard event; the last is in h200-a"
    assert raised.value.next == "dgxlab report h200-a --wide"
    Session(store, h200(), "20261122-103000-h200-b", tree=source(dirty=True)).build().runs(numbers()).end()
    with pytest.raises(UsageError, match="had a hard event or was of a working tree; the last is in h200-b"):
        of(store)
    store.put("rejections", {"job_id": "20261122-103000-h200-b", "reason": "a trial", "at": 0.0})
    with pytest.raises(UsageError, match="had a hard event or was rejected with its session; the last is in h200-b"):
        of(store)


def test_a_session_that_has_not_ended_is_named_where_it_alone_measured_a_cell(store: Store) -> None:
    two = session_of_two(store, "20261121-103000-h200-vs-w4a16-b").build().gates()
    two.chains(lambda step, role, cycle: 100.0 + cycle).save()
    with pytest.raises(UsageError) as raised:
        of(store)
    assert str(raised.value).endswith("such a cell there is of a session that has not ended; the last is in 4a16-b")
    assert raised.value.next == "dgxlab report 4a16-b --wide"


# -- the statistics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sessions", [8, 12, 30])
def test_steady_histories_rarely_show_a_change(sessions: int) -> None:
    """In 200 of them at most as many as a rate of ALPHA gives, with two standard errors."""
    random = np.random.default_rng(sessions)
    seen = sum(bool(change_points(list(random.lognormal(5, 0.02, sessions)))) for _ in range(200))
    assert 1 <= seen <= 200 * ALPHA + 2 * (200 * ALPHA * (1 - ALPHA)) ** 0.5


def test_planted_steps_are_found_and_their_sizes_are_right() -> None:
    random = np.random.default_rng(1)
    noise = random.lognormal(0, 0.01, 30)
    levels = np.repeat([100.0, 104.0, 97.0], 10)
    first, second = change_points(list(levels * noise))
    assert (first.at, second.at) == (10, 20)
    assert (first.share, second.share) == (pytest.approx(0.04, abs=0.01), pytest.approx(97 / 104 - 1, abs=0.01))


def test_too_few_or_equal_values_have_none() -> None:
    assert change_points([100.0] * 20) == []
    assert change_points([100.0] * 3 + [200.0] * (LEAST - 4)) == []
    assert [change.at for change in change_points([100.0] * 4 + [200.0] * (LEAST - 4))] == [4]


def test_without_ruptures_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ruptures", None)
    with pytest.raises(UsageError, match="change points are found with ruptures") as error:
        change_points([1.0] * LEAST)
    assert error.value.next == f"{sys.executable} -m pip install 'ruptures>=1.1.9'"
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["history"] == [histories.FLOOR]
