"""`dgxlab db check`, `db rebuild` and `db merge`, and git calling the latter when two branches both measured."""

import json
import re
import shutil
import sqlite3
from pathlib import Path

import pytest

from dgxlab.audit import check
from dgxlab.lab.starter import merge_driver
from dgxlab.store import Store
from dgxlab.store.seals import seal_all
from tests import toy
from tests.cli.conftest import Project
from tests.conftest import PROJECT

TOY = "experiments/toy.yaml"


def sessions(database: Path) -> list[str]:
    store = Store.open(database)
    try:
        assert check(store) == []
        return sorted(job.job_id for job in store.jobs())
    finally:
        store.close()


def test_options_of_all_commands_are_taken_before_the_command_too(
    measured: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert measured.json("db", "check", "results.db") == {"problems": [], "beyond": []}
    monkeypatch.setenv("DGXLAB_DB", "environment.db")
    ran = measured.run("--db", "results.db", "--format", "json", "--quiet", "db", "check")
    assert (json.loads(ran.out)["problems"], ran.err) == ([], "")
    assert measured.run("--db", "before.db", "-q", "db", "check", "--db", "results.db").out == "ok\n"
    assert "environment.db" in measured.run("db", "check").error
    assert measured.run("--db", "before.db", "report").error == "there is no database before.db"


def test_tampered_record_exits_with_11(measured: Project) -> None:
    connection = sqlite3.connect("results.db")
    connection.execute("UPDATE cells SET params = json_set(params, '$.n_prompt', 99) WHERE label = 'pp16'")
    connection.commit()
    connection.close()
    ran = measured.run("db", "check")
    assert (ran.rc, "table cells " in ran.out, "digest of its" in ran.out) == (11, True, True)
    assert ran.error == f"{measured.folder}/results.db has 2 problems"
    assert ran.next


def test_a_deleted_record_is_made_again(project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "lone").mkdir()
    project.hosts.write_text(f"lone: {{local: true, root: {tmp_path / 'lone'}}}\n")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "kept"))
    project.ok("run", TOY, "--host", "lone", "-q")
    Path("results.db").unlink()
    assert project.run("db", "rebuild", "-q").out == "1 job recorded\n"
    assert project.run("db", "rebuild", "new.db", "--host", "lone", "-q").out == "1 job recorded\n"
    assert sessions(Path("results.db")) == sessions(Path("new.db"))
    again = project.run("db", "rebuild", "--host", "lone", "--format", "json", "-q")
    assert json.loads(again.out) == {"added": [], "left": []}
    (archive,) = (tmp_path / "kept" / "dgxlab" / "raw").iterdir()
    archive.write_bytes(archive.read_bytes()[:100])
    ran = project.run("db", "rebuild", "third.db")
    assert (ran.rc, ran.error.startswith("1 job ")) == (11, True)
    assert "is left out: " in ran.out
    assert ran.out.endswith("no jobs recorded\n")


@pytest.fixture
def notebook(measured: Project) -> Project:
    """A project under git whose results.db is tracked, with the merge driver that `dgxlab init` sets up."""
    folder = measured.folder
    shutil.copy(PROJECT / ".gitattributes", folder)
    toy.git(folder, "init", "-q", "-b", "main")
    for name, value in merge_driver().items():
        toy.git(folder, "config", name, value)
    toy.git(folder, "add", ".gitattributes", "results.db", "experiments")
    toy.git(folder, "commit", "-q", "-m", "base")
    return measured


def test_git_merges_two_branches_that_both_measured(notebook: Project) -> None:
    folder = notebook.folder
    (base,) = sessions(folder / "results.db")
    added = {}
    for branch in ("laptop", "main"):
        toy.git(folder, "checkout", "-q", "-B", branch, "main")
        notebook.ok("run", TOY, "-q", "--again")
        (added[branch],) = set(sessions(folder / "results.db")) - {base}
        toy.git(folder, "commit", "-q", "-a", "-m", f"measured on {branch}")
    toy.git(folder, "merge", "-q", "laptop", "-m", "both")
    assert toy.git(folder, "status", "--porcelain", "--untracked-files=no") == ""
    assert sessions(folder / "results.db") == sorted([base, *added.values()])


def test_a_merge_counts_what_it_adds_in_the_words_of_the_report(measured: Project) -> None:
    """A version of an experiment is a spec; the report counts experiments by their names."""
    measured.ok("session", "note", *sessions(Path("results.db")), "why")
    Store.open(Path("new.db")).close()
    added = measured.ok("db", "merge", "new.db", "results.db").out
    assert re.fullmatch(r"\d+ rows added: 1 session, 1 spec, \d+ runs, \d+ samples, 1 note\n", added)
    assert measured.ok("db", "merge", "new.db", "results.db").out == "no rows added\n"


def test_git_leaves_a_conflict_where_records_contradict(notebook: Project) -> None:
    folder = notebook.folder
    for branch, hypothesis in (("laptop", "one"), ("main", "two")):
        toy.git(folder, "checkout", "-q", "-B", branch, "main")
        connection = sqlite3.connect(folder / "results.db")
        connection.execute("UPDATE experiments SET hypothesis = ?", (hypothesis,))
        seal_all(connection)
        connection.commit()
        connection.close()
        toy.git(folder, "commit", "-q", "-a", "-m", hypothesis)
    ours = (folder / "results.db").read_bytes()
    with pytest.raises(AssertionError) as refused:
        toy.git(folder, "merge", "laptop", "-m", "both")
    assert "disagree on experiments" in str(refused.value)
    assert "Traceback" not in str(refused.value)
    assert toy.git(folder, "status", "--porcelain", "--untracked-files=no") == "UU results.db"
    assert (folder / "results.db").read_bytes() == ours
