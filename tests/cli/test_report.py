"""`dgxlab report`: everything at a glance, one form, documents that are kept true, and a terminal."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import sqlite3
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from dgxlab.document import Document
from tests.cli.conftest import Project, shown_on
from tests.conftest import PROJECT
from tests.report.test_markdown import tokens

BLOCK = "<!-- dgxlab:report form={} -->\n<!-- /dgxlab -->\n"
PLAN = f"# Plan\r\n\nprose\n{BLOCK.format('ops experiment=toy')}\n{BLOCK.format('gates experiment=toy')}no last newline"


@pytest.fixture
def plan(measured: Project) -> Path:
    """Give a document with two empty blocks in a project with a record."""
    path = measured.folder / "plan.md"
    path.write_bytes(PLAN.encode())
    return path


def test_alone_it_shows_the_latest_of_everything(measured: Project) -> None:
    """A line a session and a gate; the same as JSON."""
    ran = measured.run("report")
    assert (ran.rc, ran.err) == (0, measured.where)
    assert ran.out.startswith(
        "# results.db: 1 session, 1 experiment" if "1 session," in ran.out else "# results.db: 1 "
    )
    assert re.search(r"(?m)^\| \w{6} \| run \| local \| 3 of 3 \| done \|$", ran.out)
    assert re.search(r"(?m)^\| MUL_MAT on CPU \| toy \| \w+ \| 4/4 \| passed \|", ran.out)
    twin = json.loads(measured.run("report", "--format", "json").out)
    assert (twin["record"], twin["counts"]["sessions"], [t["title"] for t in twin["tables"]]) == (
        *("results.db", 1),
        ["Sessions", "Gates"],
    )


def test_one_form(measured: Project) -> None:
    """Of what ran last, of an experiment, of a session by its beginning; as JSON too."""
    ops = measured.run("report", "--form", "ops")
    assert (ops.rc, ops.err) == (0, measured.where)
    assert ops.out.startswith("| n | time (us) | ")
    assert measured.run("report", "--form", "ops", "toy").out == ops.out
    (row,) = json.loads(measured.run("report", "--format", "json").out)["tables"][0]["rows"]
    for session in (row["session"][:-2], row["session"][-6:]):
        assert measured.run("report", session, "--form", "ops").out == ops.out
    twin = json.loads(measured.run("report", "--form", "ops", "--cells", "n=8", "--format", "json").out)
    assert (twin["form"], [row["n"] for row in twin["tables"][0]["rows"]]) == ("ops", [8])
    assert measured.run("report", "toy", "--form", "levers").out.startswith("| lever | status |")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("toy", "toy2"), "several names are side by side in a form"),
        (("toy", "--model", "m"), "--model narrows a form"),
        (("toy", "--form", "gates", "--model", "m"), "form=gates takes no key 'model'"),
        (("toy", "toy", "--form", "ops"), "experiment names 'toy' twice"),
        (("--form", "verdicts"), "no session has a verdict yet"),
        (("--plots", "x"), "--plots draws the whole report of an experiment or a session"),
        (("toy", "--form", "ops", "--plots", "x"), "--plots draws the whole report of an experiment or a session"),
        (("--update",), "--update needs a document"),
        (("--check", "plan.md", "--form", "ops"), "--check takes documents and nothing else"),
        (("--check", "--update", "plan.md"), "--update takes documents and nothing else"),
    ],
)
def test_what_does_not_go_together(measured: Project, args: tuple[str, ...], said: str) -> None:
    """Exit code 2 and one sentence."""
    ran = measured.run("report", *args)
    assert (ran.rc, ran.out) == (2, "")
    assert ran.error.startswith(said)
    assert "\nnext: dgxlab " in ran.err


def test_a_form_alone_is_of_what_ran_last_with_such_numbers(measured: Project, tmp_path: Path) -> None:
    """A newer session without operations does not hide the older one that has them."""
    ops = measured.run("report", "--form", "ops").out
    newer = tmp_path / "newer.db"
    newer.write_bytes((measured.folder / "results.db").read_bytes())
    changed = {
        "job_id": "'20991231-000000-idle-aaaaaa'",
        "run_id": "run_id || 'x'",
        "name": "'idle'",
        "arm": "'idle'",
        "intent_at": "intent_at + 9",
    }
    with sqlite3.connect(newer) as db:
        for table, where in (("jobs", "1"), ("arms", "1"), ("runs", "tool = 'batched-bench'")):
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            chosen = ", ".join(changed.get(column, column) for column in columns)
            db.execute(f"INSERT INTO {table} SELECT {chosen} FROM {table} WHERE {where}")  # noqa: S608 - our own
    assert "| aaaaaa | run |" in measured.run("report", "--db", str(newer)).out
    assert measured.run("report", "--form", "ops", "--db", str(newer)).out == ops


def test_pictures_are_linked_below(measured: Project) -> None:
    """And are there; the report itself is the same."""
    plain = measured.run("report", "toy").out
    ran = measured.run("report", "toy", "--plots", "my pictures")
    assert ran.out.startswith(plain.rstrip("\n"))
    links = re.findall(r"(?m)^!\[(\S+)\]\(my%20pictures/(\S+)\)$", ran.out)
    assert [stem for stem, _ in links] == ["toy-ops", "toy-concurrency"]
    assert all((measured.folder / "my pictures" / name).read_bytes().startswith(b"\x89PNG") for _, name in links)


def test_a_document_is_filled_and_then_current(measured: Project, plan: Path) -> None:
    """Stale before, with file and line; filled; then nothing is left to do."""
    ran = measured.run("report", "--check", "plan.md")
    assert (ran.rc, ran.error, ran.next) == (
        *(11, "2 of 2 blocks are not current"),
        "dgxlab report --update plan.md",
    )
    assert ran.out == "plan.md:4: form=ops is stale\nplan.md:7: form=gates is stale\n"
    assert plan.read_bytes() == PLAN.encode()
    assert measured.run("report", "--update", "plan.md").out == "plan.md: 2 blocks, 2 filled anew\n"
    text = plan.read_bytes().decode()
    assert re.sub(r"(?s)(form=\w+ experiment=toy -->\n).*?(<!-- /)", r"\1\2", text) == PLAN
    assert measured.run("report", "--form", "ops", "toy").out in text
    assert measured.run("report", "--check", "plan.md").rc == 0
    plan.write_bytes(text.replace("4/4", "5/5").encode())  # one digit of one block, as a hand would change it
    stale = measured.run("report", "--check", "plan.md", "--format", "json")
    assert (stale.rc, stale.error) == (11, "1 of 2 blocks is not current")
    assert [block["state"] for block in json.loads(stale.out)["blocks"]] == ["current", "stale"]
    plan.write_bytes(text.encode())
    before = plan.stat()
    assert measured.run("report", "--update", "plan.md").out == "plan.md: 2 blocks, none filled anew\n"
    assert (plan.stat().st_ino, plan.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_block_of_what_does_not_exist(measured: Project, plan: Path) -> None:
    """A check lists it beside the stale ones; an update writes no document at all."""
    other = plan.with_name("other.md")
    other.write_text(BLOCK.format("ops experiment=tay") + BLOCK.format("verdicts experiment=toy"))
    ran = measured.run("report", "--check", "plan.md", "other.md")
    assert (ran.rc, ran.error) == (11, "4 of 4 blocks are not current")
    said = [line.replace(str(measured.folder) + "/", "") for line in ran.out.splitlines()]
    assert said == [
        "plan.md:4: form=ops is stale",
        "plan.md:7: form=gates is stale",
        "other.md:1: form=ops is missing: results.db has no session of an experiment 'tay'; there is 'toy'",
        "other.md:3: form=verdicts is missing: results.db has no verdict on 'toy'",
    ]
    before = [path.read_bytes() for path in (plan, other)]
    ran = measured.run("report", "--update", "plan.md", "other.md")
    assert (ran.rc, ran.out) == (9, "")
    assert ran.error.startswith("other.md:1: ")
    assert ran.error.endswith("; nothing was written")
    assert "other.md:3: form=verdicts is missing" in ran.err
    assert [path.read_bytes() for path in (plan, other)] == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BLOCK.format("opps experiment=toy"), "other.md:1: form 'opps'; there is 'ops'"),
        ("a\n<!-- dgxlab:report form=ops experiment=toy -->\n", "other.md:2: the block has no end"),
    ],
)
def test_a_marker_that_is_wrong_is_refused(measured: Project, plan: Path, text: str, said: str) -> None:
    """By update and check alike: exit code 9 with file, line and reason, and no document is touched."""
    other = plan.with_name("other.md")
    other.write_text(text)
    for word in ("--update", "--check"):
        ran = measured.run("report", word, "plan.md", "other.md")
        assert (ran.rc, ran.out) == (9, "")
        assert ran.error.startswith(said)
        assert ran.next == "${EDITOR:-vi} other.md"
    assert (plan.read_bytes(), other.read_text()) == (PLAN.encode(), text)


def test_what_the_record_says_cannot_end_its_block(measured: Project, plan: Path) -> None:
    """Markers in a hypothesis are text in the table, also when the document is read again."""
    evil = "x\n<!-- /dgxlab -->\n```\n<!-- dgxlab:report form=ops -->"
    with sqlite3.connect(measured.folder / "results.db") as record:
        record.execute("UPDATE experiments SET hypothesis = ?", (evil,))
    plan.write_text(BLOCK.format("levers") + "after\n")
    for _ in range(2):
        assert measured.run("report", "--update", "plan.md").rc == 0
        assert len(Document(plan).blocks) == 1
    assert plan.read_text().endswith("\n\n<!-- /dgxlab -->\nafter\n")
    assert "\n- toy: x \\<!-- /dgxlab --\\> \\`\\`\\` " in plan.read_text()
    assert measured.run("report", "--check", "plan.md").rc == 0


def test_one_document_under_two_names_is_one(measured: Project, plan: Path) -> None:
    """Else the second would overwrite the first."""
    ran = measured.run("report", "--update", "plan.md", f"../{measured.folder.name}/plan.md")
    assert (ran.rc, ran.out) == (0, "plan.md: 2 blocks, 2 filled anew\n")


def test_the_plans_of_this_repository_are_current(tmp_path: Path, dgxlab: object) -> None:
    """Their tables are those of the record beside them, and their pictures are there."""
    record = shutil.copy(PROJECT / "results.db", tmp_path / "results.db")
    plans = sorted((PROJECT / "plans").glob("*.md"))
    assert [path.name for path in plans] == ["nvfp4.md", "w4a16-ladder.md", "w4a16.md"]
    ran = dgxlab("report", "--check", *plans, "--db", record)  # type: ignore[operator]
    assert ran.rc == 0, f"run: dgxlab report --update plans/*.md\n{ran.out}"
    for path in plans:
        # a ladder is history, written by hand
        assert len(Document(path).blocks) >= (0 if path.stem.endswith("-ladder") else 3)
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / name).is_file(), name


# -- on a terminal ----------------------------------------------------------------------------------------------------


def on_a_terminal(project: Project, columns: int, *args: str) -> str:
    """Return what a terminal of that width would get, without its colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    env = {**{k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}, "TERM": "xterm"}
    command = [sys.executable, "-m", "dgxlab", *args]
    child = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, cwd=project.folder, env=env)
    os.close(theirs)
    shown = shown_on(ours)
    _, err = child.communicate()
    assert (child.returncode, err.decode()) == (0, project.where)
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r\n", "\n")


@pytest.mark.parametrize(
    ("columns", "args"),
    [(30, ("report",)), (200, ("report", "toy")), (30, ("report", "--form", "provenance", "toy"))],
)
def test_a_terminal_shows_the_same_words_and_numbers(measured: Project, columns: int, args: tuple[str, ...]) -> None:
    """Drawn instead of marked up, whatever its width; a number is never broken or cut."""
    piped = measured.run(*args).out
    shown = on_a_terminal(measured, columns, *args)
    assert "| --- |" not in shown
    assert "─" in shown
    assert ("Sources:" in shown) == ("<summary>Sources</summary>" in piped)
    assert "<details>" not in shown
    words = "".join(
        child.content
        for token in tokens(piped)
        for child in token.children or []
        if child.type in ("text", "text_special", "code_inline")
    )
    visible = {char: shown.count(char) for char in set("".join(words.split()))}
    assert {char: n for char, n in visible.items() if n < words.count(char)} == {}
    numbers = re.findall(r"(?<=\| )\d[\d.]*(?= \|)", piped)
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", shown)] == []


def test_json_on_a_terminal_is_json(measured: Project) -> None:
    """Whoever asks for it gets it."""
    assert json.loads(on_a_terminal(measured, 80, "report", "toy", "--format", "json"))["title"] == "Experiment toy"
