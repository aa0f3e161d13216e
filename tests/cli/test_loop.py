"""`dgxlab try` and its ledger: what drops a change, what promotes one, and what is measured once."""

import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dgxlab.errors import UsageError
from dgxlab.judgement import tries
from dgxlab.source import cache_path
from dgxlab.source.programs import locked
from dgxlab.store import Store
from tests import toy
from tests.cli.conftest import Project, Ran

SPEC = """extends: toy.yaml
env: {TOY: noisy}
gates: [{engaged: {stderr: "toy-marker: here"}}]
bench: [{llama-bench: {model: m, n_prompt: 16}}]
holdout: [{llama-bench: {model: m, n_prompt: 32}}]
session: {cycles: 8}
"""
BENCH, OPS, TIME = "tools/llama-bench.c", "tools/test-backend-ops.c", "10000000"


@dataclass
class Loop:
    """A loop on a checkout of the toy."""

    project: Project
    checkout: Path

    def edit(self, file: str, old: str, new: str, *, more: bool = False) -> None:
        """Change a file of the checkout, which is otherwise the pin unless `more`."""
        if not more:
            toy.git(self.checkout, "checkout", "-q", ".")
        path = self.checkout / file
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    def try_(self, *options: str, because: str = "it is faster") -> Ran:
        return self.project.run("try", "stock", "--tree", self.checkout, "--because", because, *options)

    def ended(self, *options: str) -> tuple[int, Any]:
        ran = self.try_(*options)
        assert ran.out, ran.err
        return ran.rc, json.loads(ran.out)


@pytest.fixture
def new(project: Project, tmp_path: Path) -> Loop:
    project.spec("stock", SPEC)
    return Loop(project, project.checkout(tmp_path / "llama.cpp"))


@pytest.fixture
def loop(new: Loop) -> Loop:
    """The same, with known noise."""
    new.project.ok("noise", "stock")
    return new


def test_a_faster_change_is_promoted_and_is_the_next_reference(loop: Loop) -> None:
    loop.edit(BENCH, TIME, "8900000")  # in no other test: it is not built yet
    rc, first = loop.ended()
    assert (rc, first["ended"], first["promoted"], first["number"], first["parent"]) == (0, "promoted", True, 1, None)
    (cell,) = first["cells"]
    assert (cell["cell"], cell["verdict"], round(cell["effect"], 1)) == ("pp16", "faster", 0.1)
    assert cell["ci_low"] < cell["effect"] < cell["ci_high"]
    assert first["p"] < first["level"] < first["wealth"] == 0.01
    assert {gate["status"] for gate in first["gates"]} == {"passed"}
    assert [build["reused"] for build in first["builds"]] == [True, False]  # the noise session built the baseline
    assert first["held_out"] == {"cells": 1, "slower": 0}
    assert "pp32" not in json.dumps(first)
    kinds = [row["kind"] for row in loop.project.json("sessions")]
    assert [kinds.count(kind) for kind in ("screen", "ab")] == [1, 2]
    rc, again = loop.ended()
    assert (rc, again["reused"], again["try_id"]) == (0, True, first["try_id"])
    assert len(loop.project.json("sessions")) == len(kinds)
    before = shutil.copy(loop.project.folder / "results.db", loop.project.folder / "before.db")
    loop.edit(BENCH, TIME, "9500000")  # faster than the baseline, slower than the reference
    rc, second = loop.ended()
    assert (rc, second["ended"], second["parent"]) == (11, "screen", first["try_id"])
    assert second["wealth"] is None
    loop.edit(BENCH, TIME, "8000000")
    rc, third = loop.ended()
    assert (rc, third["parent"]) == (0, first["try_id"])
    assert third["cells"][0]["effect"] == pytest.approx(0.1125, abs=0.01)
    assert third["wealth"] > 0.04
    loop.edit(BENCH, TIME, "9500000")  # again, and now against the baseline
    rc, fourth = loop.ended("--parent", "0")
    assert (rc, fourth["parent"], fourth["reused"]) == (0, None, False)
    for options in (("--parent", "0"), ()):
        rc, again = loop.ended(*options)
        assert (rc, again["number"], again["reused"]) == (0, 4, True)
    rows = loop.project.json("report", "--form", "tries")["tables"][0]["rows"]
    assert rows[-1]["best_speed"] == rows[-2]["best_speed"] > rows[-1]["speed"]
    assert loop.project.run("db", "check").out == "ok\n"
    loop.project.ok("db", "merge", before, "results.db")
    assert loop.project.json("tries", "list", "--db", before) == loop.project.json("tries", "list")


def test_a_try_without_an_operation_of_its_gates_ends(loop: Loop) -> None:
    """The gates judge it; refused before, it could never end."""
    loop.edit(OPS, '"MUL_MAT"', '"MUL_MATS"')
    assert loop.ended()[1]["ended"] == "screen"


def test_a_try_is_shown_over_what_it_is_compared_with(new: Loop) -> None:
    """Not over the pin, which lacks the series of the baseline; that diff is recorded too, and exported."""
    new.edit("ggml/ggml.c", "out of toys", "no toys")
    new.project.ok("patch", "export", "first", "--tree", new.checkout, "-m", "ggml : say it shortly")
    toy.git(new.checkout, "commit", "-q", "-a", "-m", "first")
    new.project.spec("stock", SPEC + "series: [first]\n")
    new.project.ok("noise", "stock")
    new.edit(BENCH, TIME, "9000000")
    first = new.ended()[1]
    new.edit(BENCH, TIME, "8000000")
    second = new.ended()[1]
    assert [told["ended"] for told in (first, second)] == ["promoted", "promoted"]
    listed = new.project.json("tries", "list")
    for rows in (listed, [first, second]):
        assert [(row["lines"], row["diff_over"]) for row in rows] == [(2, "baseline"), (2, "parent")]
    shown = [new.project.json("tries", "show", number)["diff"].splitlines() for number in ("1", "2")]
    changed = [[line[0] + line.partition("? ")[2][:7] for line in diff if line[:2] in ("- ", "+ ")] for diff in shown]
    assert changed == [["-1000000", "+9000000"], ["-9000000", "+8000000"]]
    text = new.project.ok("tries", "show", "2").out
    assert "\nlines    2, over the parent\n" in text
    assert f"\nsession  {second['sessions'][0]}\nsession  {second['sessions'][1]}\n" in text
    assert "ggml.c" not in text
    exported = new.project.json("tries", "export", "2", "faster")
    patch = (new.project.folder / "patches/faster" / exported["patches"][0]).read_text()
    assert ("+    return (i ? 8000000" in patch, "no toys" in patch) == (True, True)
    assert new.project.run("patch", "check", "faster", "--pin", new.project.machine.pin).rc == 0
    assert new.project.run("db", "check").out == "ok\n"
    with Store.open(new.project.folder / "results.db") as store:
        store.connection.execute("DROP TRIGGER tries_no_update")
        store.connection.execute("UPDATE tries SET change = NULL, lines = 4 WHERE parent IS NULL")  # an older dgxlab's
        whole = tries.diff_of(store, first["try_id"])
    old = new.project.json("tries", "show", "1")
    assert (old["diff_over"], old["diff"], "no toys" in whole) == ("pin", whole, True)
    pin = new.project.machine.pin[:12]
    assert f"\nlines    4, over pin {pin}, the baseline's series included\n" in new.project.ok("tries", "show", "1").out
    assert f"- session {second['sessions'][1]}\n" in new.project.ok("report", "--form", "tries").out
    listing, report = (new.project.ok(*words).out for words in (("tries", "list"), ("report", "--form", "tries")))
    assert (listing.count(" 4 over pin "), report.count("| 4 over pin |")) == (1, 1)


def test_what_drops_a_change(loop: Loop) -> None:
    loop.edit(BENCH, "int main", "int oops main")
    ran = loop.try_()
    assert (ran.rc, json.loads(ran.out)["ended"]) == (7, "build")
    assert re.search(r"(?m)^step \d of \d+: build stock-tree-\w+", ran.err)
    assert ran.err.splitlines()[-1].startswith("try 1: dropped by build (")
    loop.edit(OPS, '!strcmp(toy(), "wrong") ||', "1 ||")
    rc, wrong = loop.ended()
    assert (rc, wrong["ended"], wrong["p"]) == (5, "gate", None)
    assert [gate["status"] for gate in wrong["gates"]] == ["passed", "failed"]
    loop.edit(BENCH, "toy-marker: here", "toy-marker: gone")
    rc, idle = loop.ended()
    assert (rc, idle["ended"], "the path under test did not run" in idle["why"]) == (5, "gate", True)
    loop.edit(BENCH, "mixed", "stirred")
    rc, renamed = loop.ended()
    assert (rc, renamed["ended"], renamed["lines"]) == (11, "screen", 12)
    held = "static int held;\nstatic void row(int pp, int tg, int r) {\n    held = pp == 32;"
    loop.edit(BENCH, "static void row(int pp, int tg, int r) {", held)
    loop.edit(BENCH, "static long noise(void)", "static int held;\nstatic long noise(void)", more=True)
    loop.edit(BENCH, TIME, "(held ? 12000000 : 9000000)", more=True)
    rc, narrow = loop.ended()
    assert (rc, narrow["ended"], narrow["held_out"]) == (11, "overfitted", {"cells": 1, "slower": 1})
    assert narrow["p"] < narrow["level"]
    assert [row["ended"] for row in loop.project.json("tries", "list")] == [
        *("build", "gate", "gate", "screen", "overfitted"),
    ]
    assert loop.project.run("db", "check").out == "ok\n"


def test_a_crash_and_gates_that_are_not_in_order_promote_nothing(loop: Loop, tmp_path: Path) -> None:
    loop.edit(BENCH, "        misbehave();", "        abort();")
    rc, crashed = loop.ended()
    assert (rc, crashed["ended"], crashed["p"]) == (11, "screen", None)
    late = f'!setenv("TOY_COUNT", "{tmp_path}/count", 1) && calls() > 2'  # the screen's, the chain's before and after
    loop.edit(OPS, '(rounding || !strncmp(toy(), "flaky", 5)) && call == 1', late)
    loop.edit(BENCH, TIME, "9000000", more=True)
    rc, wrong = loop.ended()
    assert (rc, wrong["ended"], wrong["p"], len(wrong["sessions"])) == (5, "gate", None, 2)
    loop.edit(BENCH, TIME, "9000000")
    rc, loose = loop.ended("--set", "gates.0.backend-ops.unsupported=1")
    assert (rc, loose["ended"], loose["p"] < loose["level"]) == (5, "gate", True)
    assert loose["why"] == "--set changed what gate MUL_MAT on CPU must reach"
    loop.edit(BENCH, TIME, "8000000")
    assert loop.ended()[1]["level"] < loose["level"]  # the test has spent its own
    assert loop.project.run("db", "check").out == "ok\n"


def test_a_screen_whose_baselines_are_apart_drops_nothing(loop: Loop) -> None:
    loop.project.spec("stock", SPEC.replace("cycles: 8", "cycles: 8, drift_limit: 0.00001"))
    loop.edit(BENCH, TIME, "20000000")
    rc, slower = loop.ended()
    assert (rc, slower["ended"], slower["regressed"], len(slower["sessions"])) == (11, "chain", ["pp16"], 2)
    assert slower["p"] > 0.99
    assert loop.project.run("db", "check").out == "ok\n"


def test_a_screen_that_was_not_held_lets_nothing_pass(loop: Loop) -> None:
    """Unlike one whose baselines are apart."""
    loop.project.spec("stock", SPEC.replace("cycles: 8", "cycles: 8, thermal: cold"))
    loop.edit(BENCH, TIME, "9000000")
    ran = loop.try_()
    assert (ran.rc, "needs the device's temperature" in ran.error) == (8, True)
    assert [row["kind"] for row in loop.project.json("sessions")] == ["noise", "screen"]


def test_a_try_whose_session_was_rejected_is_measured_again(loop: Loop) -> None:
    loop.edit(BENCH, TIME, "9000000")
    first = loop.ended()[1]
    loop.project.ok("session", "reject", first["sessions"][0], "--because", "hot")
    (row,) = loop.project.json("report", "--form", "tries")["tables"][0]["rows"]
    assert (first["ended"], row["ended"], row["best_speed"]) == ("promoted", "rejected", 1.0)
    assert " rejected " in loop.project.ok("tries", "list").out
    second = loop.ended()[1]
    assert (second["reused"], second["number"], second["sessions"] != first["sessions"]) == (False, 2, True)
    assert loop.project.run("db", "check").out == "ok\n"


def test_a_try_that_was_not_finished_goes_on(loop: Loop) -> None:
    loop.edit(BENCH, TIME, "9000000")
    loop.project.spec("stock", SPEC.replace("cycles: 8", "effect: 0.001%"))
    before = len(loop.project.json("sessions"))
    ran = loop.try_("--db", "results.db")
    assert (ran.rc, ran.out) == (8, "")
    assert ran.error.startswith("the noise of pp16 on host local, ")
    assert "is too high: 40 cycles find an effect of " in ran.error
    noise, _, edit = ran.next.partition(", when it is quiet, or a larger session.effect: ")
    assert (noise, edit[-10:]) == ("dgxlab --db results.db noise experiments/stock.yaml --host local", "stock.yaml")
    assert len(loop.project.json("sessions")) == before  # it is told before anything is measured
    loop.project.spec("stock", SPEC)
    assert loop.try_("--max-minutes", "0.01").rc == 13  # after the screen
    rc, done = loop.ended()
    assert (rc, done["number"], done["ended"]) == (0, 1, "promoted")
    kinds = [row["kind"] for row in loop.project.json("sessions")]
    assert (len(kinds) - before, kinds.count("screen")) == (3, 1)


def test_a_session_that_ended_after_its_client_left_counts(new: Loop, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    new.project.spec("stock", SPEC.replace("noisy", f"noisy, TOY_HOLD: {hold}"))
    new.project.ok("noise", "stock")
    new.edit(BENCH, TIME, "20000000")
    hold.touch()
    left = new.project.spawn("try", "stock", "--tree", new.checkout, "--because", "it is faster")
    deadline = time.monotonic() + 120
    while not any((row["kind"], row["state"]) == ("screen", "running") for row in new.project.json("sessions")):
        assert left.poll() is None, left.communicate()
        assert time.monotonic() < deadline
    left.send_signal(signal.SIGINT)
    assert "goes on" in left.communicate(timeout=60)[1]
    assert left.returncode == 130
    hold.unlink()
    new.project.ok("attach")
    before = new.project.json("sessions")
    assert new.ended()[1]["ended"] == "screen"
    assert new.project.json("sessions") == before


def test_a_try_does_not_go_on_against_another_baseline(loop: Loop) -> None:
    loop.edit("ggml/ggml.c", "out of toys", "no toys")
    loop.project.ok("patch", "export", "first", "--tree", loop.checkout, "-m", "ggml : say it shortly")
    loop.edit(BENCH, TIME, "9000000")
    assert loop.try_("--max-minutes", "0.01").rc == 13  # after the screen
    loop.project.spec("stock", SPEC + "series: [first]\n")
    moved = loop.try_()
    assert (moved.rc, moved.error.partition(" tree ")[0]) == (9, "try 1 was begun against")
    assert "of stock, which has changed to" in moved.error
    loop.project.ok(*shlex.split(moved.next)[1:])
    assert loop.ended()[1]["number"] == 2
    assert [row["rejected"] for row in loop.project.json("tries", "list")] == [1, 0]
    assert "no try is called '7'" in loop.try_("--parent", "7").error  # nor of what was measured before
    shown = loop.project.json("tries", "show", "1")
    assert (shown["rejected"], shown["promoted"]) == (1, False)
    assert re.search(r"(?m)^ended +rejected$", loop.project.ok("tries", "show", "1").out)
    loop.edit(BENCH, TIME, "8000000")
    assert "try 1 is not promoted" in loop.try_("--parent", "1").error


def test_a_try_of_which_nothing_is_measured_begins_anew_against_another_baseline(new: Loop) -> None:
    new.edit("ggml/ggml.c", "out of toys", "no toys")
    new.project.ok("patch", "export", "first", "--tree", new.checkout, "-m", "ggml : say it shortly")
    new.edit(BENCH, TIME, "20000000")
    assert new.try_().rc == 8  # the noise is not known yet
    new.project.spec("stock", SPEC + "series: [first]\n")
    new.project.ok("noise", "stock")
    assert new.ended()[1]["ended"] == "screen"
    old, begun = new.project.json("tries", "list")
    assert [(row["ended"], row["lines"], row["diff_over"]) for row in (old, begun)] == [
        (None, 2, "baseline"),
        ("screen", 4, "baseline"),  # the series is taken back
    ]


def test_fixed_cycles_are_the_least_for_held_out_cells_too(new: Loop) -> None:
    """Five are too few for four of them."""
    new.project.spec("stock", SPEC.replace("cycles: 8", "cycles: 5").replace("32", "[32, 33, 34, 35]"))
    new.project.ok("noise", "stock")
    new.edit(BENCH, TIME, "9000000")
    rc, first = new.ended()
    assert (rc, first["ended"], first["held_out"]) == (0, "promoted", {"cells": 4, "slower": 0})


def test_budgets(loop: Loop) -> None:
    loop.edit(BENCH, TIME, "20000000")
    rc, slower = loop.ended("--max-tries", "1")
    assert (rc, slower["ended"], slower["cells"][0]["verdict"], slower["regressed"]) == (
        11,
        "screen",
        "slower",
        ["pp16"],
    )
    loop.edit(BENCH, TIME, "30000000")
    spent = loop.try_("--max-tries", "1")
    assert (spent.rc, "has used 1 of 1 tries" in spent.error) == (13, True)
    spent = loop.try_("--max-minutes", "0.001")
    assert (spent.rc, "of 60 ms" in spent.error) == (13, True)
    other = loop.try_("--parent", "1")
    assert (other.rc, "try 1 is not promoted over pin" in other.error) == (2, True)
    assert len(loop.project.json("tries", "list")) == 1


@pytest.mark.parametrize(
    ("change", "options", "rc", "cause"),
    [
        (lambda tree: None, (), 9, "is what it would be compared with"),
        (lambda tree: (tree / "new.c").write_text(""), (), 9, "has files that git does not track, 1 in all: new.c"),
        (lambda tree: toy.git(tree, "checkout", "-q", "--orphan", "other"), (), 9, "has no commit, so it is"),
        (lambda tree: None, ("--because", " "), 9, "--because says nothing"),
        (lambda tree: None, ("--parent", "7"), 2, "no try is called '7'"),
        (lambda tree: None, ("--host", "local,other"), 9, "not 'local,other'"),
    ],
)
def test_bad_input(new: Loop, change: Callable[[Path], object], options: tuple[str, ...], rc: int, cause: str) -> None:
    change(new.checkout)
    ran = new.try_(*options)
    assert (ran.rc, ran.out, cause in ran.error) == (rc, "", True), ran.err


def test_nothing_is_tried_that_no_gate_can_clear(new: Loop) -> None:
    """A marker says that a path was taken, not that it is right."""
    stock = (new.project.folder / "experiments" / "toy.yaml").read_text()
    gated = "  - backend-ops: {op: MUL_MAT, backend: CPU, expect: 4/4, unsupported: 1}"
    assert gated in stock
    new.project.spec("stock", stock.replace(gated, '  - engaged: {stderr: "toy-marker: here"}'))
    ran = new.try_()
    assert (ran.rc, ran.out) == (9, "")
    assert ran.error == "stock has no gate that checks results, so no try could be promoted"


def test_a_number_of_several_ledgers_needs_a_baseline() -> None:
    rows: list[Any] = [
        SimpleNamespace(number=1, baseline=name[:3], try_id=f"20261120-120301-{name}")
        for name in ("one-3f2a9c", "two-a0c67b", "two-b1d78c")
    ]
    with pytest.raises(UsageError, match="3 tries are called '1'") as refused:
        tries.find(rows, "1")
    assert refused.value.next == "run the same command again with --of one"
    with pytest.raises(UsageError, match="2 tries are called '1'") as refused:
        tries.find(rows[1:], "1")
    assert refused.value.next == "dgxlab tries list"
    assert tries.find(rows, "a0c67b") is rows[1]


def test_one_loop_a_device(new: Loop) -> None:
    new.edit(BENCH, TIME, "9000000")
    cache_path().parent.mkdir(parents=True, exist_ok=True)
    with locked(cache_path().with_name("loop-local.lock"), pytest.fail):
        ran = new.try_()
    assert (ran.rc, ran.error) == (10, "another loop uses host local: one at a time")


def test_a_loop_waits_for_the_jobs_of_people(loop: Loop, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    slow = f"llama-bench: {{model: m, n_prompt: 64, env: {{TOY_HOLD: {hold}}}}}"
    loop.project.spec("held", f"extends: toy.yaml\nbench: [{{{slow}}}]\n")
    person = loop.project.spawn("run", "held")
    while not any(row["name"] == "held" and row["state"] == "running" for row in loop.project.json("sessions")):
        assert person.poll() is None, person.communicate()
    loop.edit(BENCH, TIME, "20000000")
    ran = loop.try_("--wait", "0")
    assert (ran.rc, "-held-" in ran.error, ran.error.startswith("host local is busy, with job ")) == (10, True, True)
    with loop.project.spawn("try", "stock", "--tree", loop.checkout, "--because", "it is faster") as waiting:
        assert waiting.stderr
        told = waiting.stderr.readline()
        hold.unlink()
        person.communicate(timeout=60)
        _, told_later = waiting.communicate(timeout=60)
    assert re.match(r"waiting for the device: host local is held by job \S+-held-", told)
    assert re.fullmatch(r"(step .*\n)+try 1: dropped by screen .*\n", told_later)
    assert loop.ended()[1]["ended"] == "screen"


def test_a_decision_that_was_changed_is_found(loop: Loop) -> None:
    loop.edit(BENCH, TIME, "9000000")
    loop.ended()
    with Store.open(loop.project.folder / "results.db") as store:
        store.connection.execute("DROP TRIGGER try_ends_no_update")
        store.connection.execute("UPDATE try_ends SET level = level / 2, ended = 'chain'")
        found = [*tries.check(store)]
    assert len(found) == 2
    assert "ended as chain, and its sessions give promoted" in found[0]
    assert "has level 0.000267" in found[1]


def test_the_ledger_is_shown_drawn_and_exported(loop: Loop, tmp_path: Path) -> None:
    loop.edit(BENCH, "int main", "int oops main")
    loop.ended()
    loop.edit(BENCH, TIME, "9000000")
    loop.ended()
    loop.edit(BENCH, TIME, "12000000")
    loop.try_(because="a *bold* idea")
    shown = loop.project.ok("report", "--form", "tries", "--plots", tmp_path)
    assert "\nin all: " in shown.out
    rows = [[cell.strip() for cell in row.split("|")[1:4]] for row in shown.out.splitlines() if row.startswith("| ")]
    assert [row[:2] for row in rows[-3:]] == [["1", "build"], ["2", "promoted"], ["3", "screen"]]
    assert float(rows[-2][2]) == pytest.approx(11, abs=1)
    assert "a \\*bold\\* idea" in shown.out
    assert (tmp_path / "tries.png").read_bytes().startswith(b"\x89PNG")
    table = loop.project.json("report", "stock", "--form", "tries", "--host", "local")["tables"][0]
    bests = [row["best_speed"] for row in table["rows"]]
    assert bests[0] == 1.0
    assert bests[1] == bests[2] == pytest.approx(1.11, abs=0.01)
    assert loop.project.run("report", "other", "--form", "tries").rc == 2
    told = loop.project.json("tries", "show", "2")
    assert "+    return (i ? 9000000" in told["diff"]
    lines = loop.project.ok("tries", "show", told["try_id"][-6:]).out.splitlines()
    assert lines[1] == "because  it is faster"
    assert loop.project.run("tries", "show", "9", "--of", "stock").error == "no try is called '9'"
    exported = loop.project.ok("tries", "export", "2", "faster")
    assert (exported.out, "not promoted" in exported.err) == ("patches/faster/it-is-faster.patch\n", False)
    assert "try 3 was not promoted (ended: screen)" in loop.project.ok("tries", "export", "3", "slower").err
    assert "+    return (i ? 9000000" in (loop.project.folder / "patches/faster/it-is-faster.patch").read_text()
    assert loop.project.ok("patch", "check", "faster", "--pin", loop.project.machine.pin).rc == 0
