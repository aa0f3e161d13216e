"""`dgxlab report`: everything at a glance, one form, documents that are kept true, and a terminal."""

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import sqlite3
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.cli._terminal import draw
from dgxlab.document import Document
from dgxlab.store import Store
from tests.cli.conftest import Project, Ran, shown_on
from tests.conftest import PROJECT
from tests.report.test_markdown import tokens
from tests.report.test_verdicts import STREAM, B, held
from tests.report.worlds import session_of_two

BLOCK = "<!-- dgxlab:report form={} -->\n<!-- /dgxlab -->\n"
PLAN = f"# Plan\r\n\nprose\n{BLOCK.format('ops experiment=toy')}\n{BLOCK.format('gates experiment=toy')}no last newline"


@pytest.fixture
def plan(measured: Project) -> Path:
    """A document with two empty blocks in a project with a record."""
    path = measured.folder / "plan.md"
    path.write_bytes(PLAN.encode())
    return path


def test_alone_it_shows_the_latest_of_everything(measured: Project) -> None:
    ran = measured.run("report")
    assert (ran.rc, ran.err) == (0, measured.where)
    assert ran.out.startswith("# results.db: 1 ")
    assert re.search(r"(?m)^\| \w{6} \| run \| local \| 3 of 3 \| done \|$", ran.out)
    assert re.search(r"(?m)^\| MUL_MAT on CPU \| toy \| \w+ \| 4/4 \| passed \|", ran.out)
    twin = measured.json("report")
    assert (twin["record"], twin["counts"]["sessions"]) == ("results.db", 1)
    assert [table["title"] for table in twin["tables"]] == ["Sessions", "Gates"]


def test_a_page_for_a_browser(measured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = measured.run("report", "toy", "--html", "pages/toy.html")
    assert (ran.rc, ran.out, ran.err) == (0, "pages/toy.html: written\n", measured.where)
    page = Path("pages/toy.html").read_text()
    assert re.findall(r"<title>(.*)</title>", page) == ["Experiment toy"]
    assert page.count("<svg ") == 2
    twin = measured.json("report", "toy", "--html", "pages/toy.html")
    assert twin == {"page": "pages/toy.html", "pictures": ["toy-ops", "toy-concurrency"]}
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plain = measured.run("report", "--form", "ops", "--html", "ops.html")
    assert (plain.rc, plain.err) == (0, measured.where)
    assert "<title>ops</title>" in Path("ops.html").read_text()
    without = measured.run("report", "toy", "--html", "toy.html")
    assert without.rc == 0
    assert "note: the page has no pictures: pictures are drawn with matplotlib" in without.err
    assert Path("toy.html").read_text().count("<table>") == page.count("<table>") > 3
    (measured.folder / "file").touch()
    refused = measured.run("report", "--html", "file/below.html")
    assert (refused.rc, refused.error) == (9, "file/below.html cannot be written: File exists")


def test_a_history(measured: Project) -> None:
    ran = measured.run("report", "--history", "pp16", "--plots", "pictures")
    assert (ran.rc, ran.err) == (0, measured.where)
    assert re.search(r"(?m)^\| \w{6} \| [\d.]+ ± [\d.]+ \(5\) \|$", ran.out)
    assert "![history](pictures/history.png)" in ran.out
    assert Path("pictures/history.png").is_file()
    assert measured.json("report", "toy", "--form", "history", "--cells", "pp16")["form"] == "history"


def test_one_form(measured: Project) -> None:
    ops = measured.run("report", "--form", "ops")
    assert (ops.rc, ops.err) == (0, measured.where)
    assert ops.out.startswith("| n | time (us) | ")
    assert measured.run("report", "--form", "ops", "toy").out == ops.out
    (row,) = measured.json("report")["tables"][0]["rows"]
    for session in (row["session"][:-2], row["session"][-6:]):
        assert measured.run("report", session, "--form", "ops").out == ops.out
    twin = measured.json("report", "--form", "ops", "--cells", "n=8")
    assert (twin["form"], [row["n"] for row in twin["tables"][0]["rows"]]) == ("ops", [8])
    assert measured.run("report", "toy", "--form", "levers").out.startswith("| lever | status |")


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ("toy --model m", "--model narrows a form"),
        ("toy --form gates --model m", "--form gates takes no key 'model'"),
        ("toy toy --form ops", "experiment names 'toy' twice"),
        ("--form verdicts", "no session has a verdict yet"),
        ("--plots x", "--plots draws a whole report"),
        ("toy --form ops --plots x", "--plots draws a whole report"),
        ("--form ops --sessions x", "--sessions writes whole sessions"),
        ("toy --html x --sessions y", "--sessions writes whole sessions"),
        ("--check plan.md --html x", "--check takes documents and nothing else"),
        ("--update", "--update needs a document"),
        ("--check plan.md --form ops", "--check takes documents and nothing else"),
        ("--check --update plan.md", "--update takes documents and nothing else"),
    ],
)
def test_what_does_not_go_together(measured: Project, args: str, error: str) -> None:
    ran = measured.run("report", *args.split())
    assert (ran.rc, ran.out, "\nnext: dgxlab " in ran.err) == (2, "", True)
    assert ran.error.startswith(error)


@pytest.mark.parametrize(
    ("args", "error", "mend"),
    [
        ("toy --form history --plots x", "--form history needs --cells", "{} --cells 'pp16 tg4 B4'"),
        ("toy --html x --plots y", "--html writes a page with the pictures in it", "toy --html x"),
        ("--history pp16 --form ops", "--history is a form, with its cells", "--history pp16"),
        ("--history pp16 --cells tg4", "--history is a form, with its cells", "--history pp16"),
    ],
)
def test_the_next_command_keeps_what_was_asked_for(measured: Project, args: str, error: str, mend: str) -> None:
    """Names and options stay, and the command works as printed."""
    refused = measured.run("report", *args.split())
    assert (refused.rc, refused.error, refused.next) == (2, error, f"dgxlab report {mend.format(args)}")
    assert measured.run(*shlex.split(refused.next)[1:]).rc == 0


def test_a_form_of_experiments_shows_no_session(measured: Project) -> None:
    (row,) = measured.json("report")["tables"][0]["rows"]
    refused = measured.run("report", "--form", "steps", row["session"][-6:])
    assert (refused.rc, refused.error) == (2, f"--form steps takes experiments, and {row['session']} is a session")
    assert measured.run(*shlex.split(refused.next)[1:]).rc == 0


def test_several_names_need_a_form(project: Project) -> None:
    with Store.open(project.folder / "results.db") as store:
        held(store)
    refused = project.run("report", "h200", "w4a16", "--wide")
    assert refused.error == "a whole report is of one name: with --form, tables set h200 and w4a16 side by side"
    assert refused.next == "dgxlab report h200 w4a16 --wide --form single-stream"
    assert "| w4a16 |" in project.ok(*shlex.split(refused.next)[1:]).out
    misspelt = project.run("report", "h200", "w4a")
    assert misspelt.error.endswith("results.db has no session of an experiment 'w4a'; there is 'w4a16'")


def test_the_next_command_names_no_file_of_another_project(project: Project) -> None:
    with Store.open(project.folder / "results.db"):
        pass
    assert project.run("report", "--update").next == "dgxlab report --update plans/*.md"
    ran = project.run("report", "--form", "gates")
    assert (ran.error[-44:], ran.next) == ("has no session with results for --form gates", "dgxlab run --help")


def test_a_form_alone_is_of_what_ran_last_with_such_numbers(measured: Project, tmp_path: Path) -> None:
    forms = ("ops", "steps", "gates")
    plain = {form: measured.ok("report", "--form", form).out for form in (*forms, "concurrency")}
    newer = tmp_path / "newer.db"
    newer.write_bytes((measured.folder / "results.db").read_bytes())
    changed = {"job_id": "'20991231-000000-idle-aaaaaa'", "run_id": "run_id || 'x'", "intent_at": "intent_at + 9"}
    changed |= {"name": "'idle'", "arm": "'idle'", "host": "'other'"}
    with sqlite3.connect(newer) as db:
        for table, where in (("jobs", "1"), ("arms", "1"), ("runs", "tool = 'batched-bench'")):
            columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
            chosen = ", ".join(changed.get(column, column) for column in columns)
            db.execute(f"INSERT INTO {table} SELECT {chosen} FROM {table} WHERE {where}")  # noqa: S608 - our own
    assert "| aaaaaa | run |" in measured.run("report", "--db", str(newer)).out
    record = ("--db", str(newer))
    for form, text in plain.items():
        again = measured.ok("report", "--form", form, *record, *(("--host", "local") if form == "concurrency" else ()))
        assert again.out.replace(f" {shlex.join(record)}", "") == text
    here = ("report", "--form", "concurrency", *record, "--host")
    assert measured.run(*here, "none").error.endswith("has no session with results for --form concurrency on 'none'")
    assert measured.run("report", "--form", "profile").error.endswith("has no session with results for --form profile")


def test_verdicts_alone_are_the_newest_that_are_not_invalid(project: Project) -> None:
    with Store.open(project.folder / "results.db") as store:
        held(store)
        verdicts = project.ok("report", "--form", "verdicts").out
        session_of_two(store, B, bench=STREAM).build().gates().end("cancelled", 130)
    assert "invalid" in project.ok("report", B).out
    assert project.ok("report", "--form", "verdicts").out == verdicts


def test_a_gate_that_set_has_changed_is_not_of_the_experiment(measured: Project) -> None:
    plain = measured.ok("report", "toy").out
    failed = measured.run("run", "experiments/toy.yaml", "--set", "gates.0.backend-ops.expect=5/5")
    assert "| 5 | failed (changed by --set) |" in failed.out
    assert measured.ok("report", "toy").out == plain


def test_pictures_are_linked_below(measured: Project) -> None:
    plain = measured.run("report", "toy").out
    ran = measured.run("report", "toy", "--plots", "my pictures")
    assert ran.out.startswith(plain.rstrip("\n"))
    links = re.findall(r"(?m)^!\[(\S+)\]\(my%20pictures/(\S+)\)$", ran.out)
    assert [stem for stem, _ in links] == ["toy-ops", "toy-concurrency"]
    assert all((measured.folder / "my pictures" / name).read_bytes().startswith(b"\x89PNG") for _, name in links)
    measured.ok("gate", "toy")
    ran = measured.ok("report", measured.json("sessions")[-1]["session"], "--plots", "none")
    assert (ran.err.removeprefix(measured.where)[:17], "![" in ran.out) == ("nothing to draw: ", False)


def test_a_document_is_filled_and_then_current(measured: Project, plan: Path) -> None:
    ran = measured.run("report", "--check", "plan.md")
    assert (ran.rc, ran.next) == (11, "dgxlab report --update plan.md")
    assert ran.error == "2 of 2 blocks are not current"
    assert ran.out == "plan.md:4: form=ops is stale\nplan.md:7: form=gates is stale\n"
    assert plan.read_bytes() == PLAN.encode()
    two_names = ("plan.md", f"../{measured.folder.name}/plan.md")  # of one document
    assert measured.run("report", "--update", *two_names).out == "plan.md: 2 blocks, 2 filled anew\n"
    text = plan.read_bytes().decode()
    assert re.sub(r"(?s)(form=\w+ experiment=toy -->\n).*?(<!-- /)", r"\1\2", text) == PLAN
    assert measured.run("report", "--form", "ops", "toy").out in text
    measured.ok("report", "--check", "plan.md")
    plan.write_bytes(text.replace("4/4", "5/5").encode())  # one digit of one block, as a hand would change it
    stale = measured.run("report", "--check", "plan.md", "--format", "json")
    assert (stale.rc, stale.error) == (11, "1 of 2 blocks is not current")
    assert [block["state"] for block in json.loads(stale.out)["blocks"]] == ["current", "stale"]
    plan.write_bytes(text.encode())
    before = plan.stat()
    assert measured.run("report", "--update", "plan.md").out == "plan.md: 2 blocks, none filled anew\n"
    assert (plan.stat().st_ino, plan.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_block_of_what_does_not_exist(measured: Project, plan: Path) -> None:
    other = plan.with_name("other.md")
    other.write_text(BLOCK.format("ops experiment=tay") + BLOCK.format("verdicts experiment=toy"))
    ran = measured.run("report", "--check", "plan.md", "other.md")
    assert (ran.rc, ran.error) == (11, "4 of 4 blocks are not current")
    lines = [line.replace(str(measured.folder) + "/", "") for line in ran.out.splitlines()]
    assert lines == [
        "plan.md:4: form=ops is stale",
        "plan.md:7: form=gates is stale",
        "other.md:1: form=ops is missing: results.db has no session of an experiment 'tay'; there is 'toy'",
        "other.md:3: form=verdicts is missing: results.db has no verdict on 'toy'",
    ]
    before = [path.read_bytes() for path in (plan, other)]
    ran = measured.run("report", "--update", "plan.md", "other.md")
    assert (ran.rc, ran.out, ran.error.startswith("other.md:1: ")) == (9, "", True)
    assert "other.md:3: form=verdicts is missing" in ran.err
    assert [path.read_bytes() for path in (plan, other)] == before
    assert ran.next == "${EDITOR:-vi} other.md"
    other.write_text(BLOCK.format("verdicts experiment=toy-b baseline=toy host=local"))
    for word in ("--check", "--update"):
        assert measured.run("report", word, "other.md").next == "dgxlab ab toy toy-b --host local"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (BLOCK.format("opps experiment=toy"), "other.md:1: form 'opps'; there is 'ops'"),
        ("a\n<!-- dgxlab:report form=ops experiment=toy -->\n", "other.md:2: the block has no end"),
    ],
)
def test_a_marker_that_is_wrong_is_refused(measured: Project, plan: Path, text: str, error: str) -> None:
    other = plan.with_name("other.md")
    other.write_text(text)
    for word in ("--update", "--check"):
        ran = measured.run("report", word, "plan.md", "other.md")
        assert (ran.rc, ran.out, ran.next) == (9, "", "${EDITOR:-vi} other.md")
        assert ran.error.startswith(error)
    assert (plan.read_bytes(), other.read_text()) == (PLAN.encode(), text)


def test_what_the_record_says_cannot_end_its_block(measured: Project, plan: Path) -> None:
    evil = "x\n<!-- /dgxlab -->\n```\n<!-- dgxlab:report form=ops -->"
    with sqlite3.connect(measured.folder / "results.db") as record:
        record.execute("UPDATE experiments SET hypothesis = ?", (evil,))
    plan.write_text(BLOCK.format("levers") + "after\n")
    for _ in range(2):
        measured.ok("report", "--update", "plan.md")
        assert len(Document(plan).blocks) == 1
    assert plan.read_text().endswith("\n\n<!-- /dgxlab -->\nafter\n")
    assert "\n- toy: x \\<!-- /dgxlab --\\> \\`\\`\\` " in plan.read_text()
    measured.ok("report", "--check", "plan.md")


def test_the_plans_of_this_repository_are_current(tmp_path: Path, dgxlab: Callable[..., Ran]) -> None:
    record = shutil.copy(PROJECT / "results.db", tmp_path / "results.db")
    plans = sorted((PROJECT / "plans").glob("*.md"))
    assert {"gdn.md", "nvfp4.md", "w4a16.md"} <= {path.name for path in plans}
    ran = dgxlab("report", "--check", *plans, "--db", record)
    assert ran.rc == 0, f"run: dgxlab report --update plans/*.md\n{ran.out}"
    # a ladder is history, on a DGX Spark nothing is measured, and of the others the kernels alone
    bare = {"spark", "w4a16-ladder", "w4a16-loop", "nvfp4-moe", "kbit"}
    for path in plans:
        assert len(Document(path).blocks) >= (0 if path.stem in bare else 2)
        for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", path.read_text()):
            assert (path.parent / name).is_file(), name


def test_pages_of_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dgxlab: Callable[..., Ran]) -> None:
    monkeypatch.chdir(tmp_path)
    record = shutil.copy(PROJECT / "results.db", tmp_path / "results.db")
    plan, page = Path("plan.md"), Path("sessions/001c80.md")
    plan.write_text("[a](sessions/001c80.md)\n\nagain [b](sessions/001c80.md#gates)\n")
    ran = dgxlab("report", "--check", plan, "--db", record)
    assert (ran.rc, ran.out) == (11, f"plan.md:1: {page} is stale: there is no such file\n")
    assert ran.next == f"dgxlab --db {record} report --update plan.md"
    assert dgxlab("report", "--update", plan, "--db", record).out.endswith(f"\n{page}: written\n")
    head, _, rest = page.read_text().partition("\n\n")
    assert head.startswith("Generated by `dgxlab report --sessions DIR 001c80`")
    assert rest == dgxlab("report", "001c80", "--wide", "--db", record).out
    before = page.stat()
    for args in (("--update", plan), ("--check", plan), ("001c80", "--sessions", "sessions")):
        assert dgxlab("report", *args, "--db", record).rc == 0
    assert (page.stat().st_ino, page.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    page.write_text(page.read_text().replace("+113.63", "+113.64"))
    assert dgxlab("report", "--check", plan, "--db", record).out == f"plan.md:1: {page} is stale\n"

    sql = """SELECT job_id FROM jobs LEFT JOIN rejections USING (job_id)
             WHERE kind IN ('ab', 'noise', 'screen') AND state NOT IN ('running', 'lost') AND reason IS NULL
             ORDER BY job_id"""
    with sqlite3.connect(record) as db:
        *others, rejected = [job_id for (job_id,) in db.execute(sql) if not job_id.endswith("001c80")]
        db.execute("INSERT INTO rejections (job_id, reason, at) VALUES (?, 'a trial', 0)", (rejected,))
    assert dgxlab("report", "--sessions", "all", "--db", record).rc == 0
    written = {path.stem for path in Path("all").iterdir()}
    assert written == {"001c80", *(job_id[-6:] for job_id in others)}
    plan.write_text(f"[a](sessions/{rejected[-6:]}.md)\n[b](sessions/001c80.md)\n")
    ran = dgxlab("report", "--update", plan, "--db", record)
    assert (ran.rc, ran.next, "+113.64" in page.read_text()) == (9, "${EDITOR:-vi} plan.md", True)
    assert ran.error.startswith(f"plan.md:1: session {rejected} was rejected: a trial")


# -- on a terminal ----------------------------------------------------------------------------------------------------


def on_a_terminal(project: Project, columns: int, *args: str, **env: str) -> str:
    """Return what a terminal of that width would get."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    env = {**kept, "TERM": "xterm", **env}
    command = [sys.executable, "-m", "dgxlab", *args]
    child = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, cwd=project.folder, env=env)
    os.close(theirs)
    shown = shown_on(ours)
    _, err = child.communicate()
    assert (child.returncode, err.decode()) == (0, project.where * (args[0] == "report"))
    return shown.decode().replace("\r\n", "\n")


def uncoloured(shown: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown)


@pytest.mark.parametrize(
    ("columns", "args"), [(30, ("report",)), (200, ("report", "toy")), (30, ("report", "--form", "provenance", "toy"))]
)
def test_a_terminal_shows_the_same_words_and_numbers(measured: Project, columns: int, args: tuple[str, ...]) -> None:
    piped = measured.run(*args).out
    shown = uncoloured(on_a_terminal(measured, columns, *args))
    assert ("| --- |" in shown, "<details>" in shown, "─" in shown) == (False, False, True)
    assert ("Sources:" in shown) == ("<summary>Sources</summary>" in piped)
    assert "<details>" not in shown
    children = [child for token in tokens(piped) for child in token.children or []]
    words = "".join(child.content for child in children if child.type in ("text", "text_special", "code_inline"))
    visible = {char: shown.count(char) for char in set("".join(words.split()))}
    assert {char: n for char, n in visible.items() if n < words.count(char)} == {}
    numbers = re.findall(r"(?<=\| )\d[\d.]*(?= \|)", piped)
    assert [number for number in numbers if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.])", shown)] == []


def test_a_narrow_terminal_stacks_rows(measured: Project) -> None:
    """No line is wider than the terminal, and a row has a line for each of its cells."""
    for args in (("report", "toy"), ("sessions",)):
        assert max(map(len, uncoloured(on_a_terminal(measured, 40, *args)).splitlines())) <= 40, args
    lines = on_a_terminal(measured, 40, "sessions").splitlines()
    assert [line.split()[0] for line in lines] == ["session", "begun", "kind", "name", "host", "runs", "outcome"]
    assert len(on_a_terminal(measured, 200, "sessions").splitlines()) == 2


@pytest.mark.parametrize("columns", [32, 36, 100])
def test_a_report_fits_into_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: int
) -> None:
    """A long name stays whole beside texts that can be narrower, and prose of a file's width is folded anew."""
    monkeypatch.setenv("COLUMNS", str(columns))
    prose = " ".join(["word"] * 40)
    draw(f"| name | told by |\n| --- | --- |\n| {'n' * 24} | a bb cc dd ee |\n\n{prose[:119]}\n{prose[120:]}\n")
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line.startswith(f"{'n' * 24}  a bb")]
    full = (columns + 1) // len("word ")
    assert [line.count("word") for line in lines if "word" in line][:-1] == [full] * ((40 - 1) // full)


@pytest.mark.parametrize(("env", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_verdicts_are_coloured_unless_the_user_says_no(project: Project, env: dict[str, str], coloured: bool) -> None:
    (project.folder / "chains.jsonl").write_text(
        json.dumps({"name": "gain", "a": [10 + n / 100 for n in range(9)], "b": [20] * 8, "better": "higher"})
    )
    shown = on_a_terminal(project, 80, "verdict", "chains.jsonl", **env)
    assert uncoloured(shown).startswith("gain: faster, +")
    assert ("gain: \x1b[32mfaster\x1b[0m" in shown, "\x1b[3" in shown) == (coloured, coloured)


def test_outcomes_in_a_list_are_coloured(measured: Project) -> None:
    (row,) = measured.json("sessions")
    measured.ok("session", "reject", row["alias"], "--because", "failed twice")
    shown = on_a_terminal(measured, 200, "sessions")
    assert "  \x1b[31mrejected\x1b[0m: failed twice\n" in shown
    assert uncoloured(shown) == measured.ok("sessions").out


def test_json_on_a_terminal_is_json(measured: Project) -> None:
    assert json.loads(on_a_terminal(measured, 80, "report", "toy", "--format", "json"))["title"] == "Experiment toy"
