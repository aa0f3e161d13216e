"""datasette with the record: what it describes and can be asked, how it shows values, and that it only reads."""

import asyncio
import contextlib
import hashlib
import html
import re
import shutil
import sqlite3
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from dgxlab import served
from dgxlab.errors import SpecError, UsageError
from dgxlab.store import Store
from tests.conftest import PROJECT
from tests.journals import THROTTLED, source
from tests.report.worlds import session_of_two, whole

STEP = {"baseline": 100.0, "burn-in": 100.0, "candidate": 110.0}


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of an A/B session, and of an experiment whose tree changed before half of it was measured again."""
    path = tmp_path_factory.mktemp("served") / "results.db"
    with Store.open(path) as store:
        whole(store)
        again = whole(store, "20261121-103000-h200-b", tree=source(["later"]), wanted=lambda model, *_: not model)
        assert again.plan.runs
        two = session_of_two(store, "20261119-10-ab-c").build().gates()
        two.chains(lambda step, role, cycle: STEP[role] + 0.1 * cycle).gates(after=True).end()
    return path


@pytest.fixture
def ask(record: Path) -> Iterator[Any]:
    with asked(record) as get:
        yield get


@contextlib.contextmanager
def asked(path: Path) -> Iterator[Any]:
    """Give a function that gets a page of a record, as text or as JSON."""
    datasette = served.application(path)

    def get(page: str, asked_for: str = "localhost", **params: str) -> Any:
        address = f"/{served.NAME}{page}?{urlencode(params)}"
        reply = asyncio.run(datasette.client.get(address, headers={"host": asked_for}))
        assert reply.status_code == (200 if asked_for == "localhost" else 403), reply.text
        return reply.json() if page.endswith(".json") else reply.text

    with contextlib.closing(datasette.databases[served.NAME]):
        yield get


def rows(ask: Any, query: str, **params: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(f"/{query}.json", _shape="array", **params)
    return found


def test_every_table_and_view_is_described(store: Store) -> None:
    every = {row["name"] for row in store.rows("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")}
    own = {name for name in every if not name.startswith("sqlite_")}
    assert served.tables().keys() == own - set(served.HIDDEN)
    assert own.issuperset(served.HIDDEN)


def test_its_page_lists_the_queries_before_the_tables(ask: Any) -> None:
    page = ask("")
    titles = [query["title"] for query in served.queries().values()]
    assert re.findall(r'<li><a href="/record/\w+" title="[^"]*">([^<]*)</a>', page) == titles
    assert page.index(titles[-1]) < page.index(">Tables</h2>")
    assert served.tables()["runs"] in html.unescape(ask("/runs"))


def test_verdicts(ask: Any) -> None:
    faster = rows(ask, "verdicts", verdict="faster")
    assert {row["verdict"] for row in rows(ask, "verdicts", verdict="")} == {"faster", "slower"}
    assert {row["candidate_arm"] for row in faster} == {"w4a16"}
    assert faster[0]["session"] == "0-ab-c"
    assert faster[0]["low"] < faster[0]["effect_percent"] < faster[0]["high"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", faster[0]["begun"])


def test_history_of_a_cell(ask: Any) -> None:
    of_name = rows(ask, "history", cell="pp512", experiment="h200", host="")
    assert {row["session"] for row in of_name if not row["chain"]} == {"h200-a"}
    assert sum(bool(row["chain"]) for row in of_name) > 9
    assert {row["metric"] for row in of_name} == {"avg_ts"}
    assert rows(ask, "history", cell="pp512", experiment="h200", host="elsewhere") == []


def test_what_a_disturbed_run_and_same_mean(record: Path, tmp_path: Path) -> None:
    """A run with a hard flag does not count, and the interval of `same` is its own."""
    path = Path(shutil.copy(record, tmp_path))
    with Store.open(path) as store:
        (run, *_) = store.rows("SELECT run_id FROM measurements WHERE label = 'pp512' AND job_id LIKE '%h200-a'")
        store.put("flags", {**run, **THROTTLED})
        with store.transaction():
            store.connection.execute(
                "UPDATE verdicts SET (verdict, promoted, same_low, same_high) = ('same', 0, -0.01, 0.02)"
            )
    with asked(path) as ask:
        assert all(row["chain"] for row in rows(ask, "history", cell="pp512", experiment="h200", host=""))
        assert {(row["low"], row["high"]) for row in rows(ask, "verdicts", verdict="same")} == {(-1.0, 2.0)}


def test_gates_and_sessions(ask: Any) -> None:
    assert {(row["gate"], row["passed"], row["status"]) for row in rows(ask, "gates")} == {
        ("MUL_MAT on CUDA0", 1103, "passed")
    }
    kinds = [(row["session"], row["kind"], row["runs"]) for row in rows(ask, "sessions", name="h200")]
    assert kinds == [("h200-b", "run", "1 of 1"), ("h200-a", "run", "3 of 3")]


def test_a_pass_hides_no_failure_of_another_experiment_on_the_same_build(record: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(record, tmp_path))
    with Store.open(path) as store:
        (gate, *_) = store.rows("SELECT * FROM gates ORDER BY at DESC")
        (arm,) = store.rows("SELECT * FROM arms WHERE (job_id, arm) = (?, ?)", (gate["job_id"], gate["arm"]))
        store.put("arms", {**arm, "arm": "strict"})
        store.put("gates", {**gate, "gate_id": "0", "arm": "strict", "status": "failed", "at": gate["at"] - 1})
    with asked(path) as ask:
        (failed, *passed) = rows(ask, "gates")
    assert (failed["experiment"], failed["status"]) == ("strict", "failed")
    assert gate["arm"] in {row["experiment"] for row in passed}


def test_what_is_stale(ask: Any) -> None:
    """What was not measured again since the tree changed."""
    stale = [row for row in rows(ask, "stale") if row["session"] == "h200-a"]
    assert {row["model"] for row in stale} == {"q4k"}
    assert {row["because"] for row in stale} == {"another build in h200-b"}


def test_times_and_deflated_texts_are_readable(ask: Any, record: Path) -> None:
    with contextlib.closing(sqlite3.connect(f"file:{record}?mode=ro", uri=True)) as plain:
        ((started,),) = plain.execute("SELECT started FROM runs ORDER BY run_id LIMIT 1").fetchall()
        ((shown,),) = plain.execute("SELECT datetime(?, 'unixepoch')", (started,)).fetchall()
    page = html.unescape(ask("/runs", _sort="run_id"))
    assert re.search(rf'<td class="col-started[^>]*>{shown}</td>', page)
    assert "test-backend-ops" in re.findall(r'<td class="col-argv[^>]*>(.*?)</td>', page)[0]
    (row, *_) = rows(ask, "runs", _sort="run_id", _col="started")
    assert row["started"] == started
    (text,) = ask(".json", sql="SELECT inflated(plan) FROM jobs LIMIT 1", _shape="arrayfirst")
    assert text.startswith("{")


def test_nothing_can_be_written_and_no_other_name_is_answered(ask: Any, record: Path) -> None:
    before = hashlib.sha256(record.read_bytes()).digest()
    datasette = served.application(record)
    connection = datasette.databases[served.NAME].connect()
    with contextlib.closing(connection), pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM verdicts")
    assert ask("", asked_for="elsewhere.example") == "This is only at 127.0.0.1."
    assert hashlib.sha256(record.read_bytes()).digest() == before


def test_a_record_of_an_older_schema_is_refused_and_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "old.db"
    Store.open(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 12")
    before = path.read_bytes()
    with pytest.raises(SpecError, match="has schema 12, and is served from schema") as error:
        served.application(path)
    assert error.value.next == f"dgxlab db check {path}"
    assert path.read_bytes() == before
    with pytest.raises(SpecError, match="there is no database"):
        served.application(tmp_path / "none.db")


def test_without_datasette_the_command_that_installs_it(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasette.app", None)
    with pytest.raises(UsageError, match="datasette serves the record, and there is no module") as error:
        served.application(record)
    assert error.value.next == f"{sys.executable} -m pip install 'datasette>=0.65,<1'"
    extras = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["browser"] == [served.FLOOR]
