"""`dgxlab bisect`, `ablate`, `pin check`: planted patches are found, and what cannot be tested is said."""

import json
import re
import shutil
from pathlib import Path

import pytest

from dgxlab.cli.search import shown_verdicts
from dgxlab.lab.search import Subject
from dgxlab.stats import Verdict
from tests import toy
from tests.cli.conftest import Project

STREAM = """extends: toy.yaml
series: [many]
env: {TOY: noisy, TOY_COUNT: CALLS}
bench: [{llama-bench: {model: m, n_prompt: [16, 32], n_gen: 4}}]
session: {cycles: 6}
"""
SLOW = '(strcmp(toy(), "half") ? 1 : 2)'
BROKEN = "#error broken\n"


def spec(project: Project, name: str, text: str) -> None:
    project.spec(name, text.replace("CALLS", str(project.folder.parent / "calls")))


def commit(checkout: Path, subject: str, file: str, old: str, new: str) -> str:
    """Commit a change of one file of the toy; an empty `old` is its end."""
    path = checkout / file
    text = path.read_text()
    path.write_text(text.replace(old, new) if old else text + new)
    toy.git(checkout, "commit", "-q", "-a", "-m", subject)
    return toy.git(checkout, "rev-parse", "HEAD")


@pytest.fixture
def checkout(project: Project, tmp_path: Path) -> Path:
    """Five commits on the pin: the second does not compile before the third, and the fourth is slow."""
    where = project.checkout(tmp_path / "llama.cpp")
    commit(where, "toy : one", "tools/llama-completion.c", "", "int one;\n")
    commit(where, "toy : break", "ggml/ggml.c", "", BROKEN)
    commit(where, "toy : mend", "ggml/ggml.c", BROKEN, "int mended;\n")
    commit(where, "toy : slow", "tools/llama-bench.c", SLOW, f"{SLOW} * 5 / 4")
    commit(where, "toy : five", "tools/llama-completion.c", "int one;\n", "int one, five;\n")
    return where


@pytest.fixture
def many(project: Project, checkout: Path) -> Project:
    """A project whose series `many` has the five as patches, and an experiment that applies it."""
    project.ok("patch", "export", "many", "--tree", checkout)
    spec(project, "stream", STREAM)
    return project


def test_a_slow_patch_is_found(many: Project) -> None:
    """Noise of 1 % hides nothing, and the answer says how sure it is."""
    ran = many.json("bisect", "0", "5", "--series", "many", "--cell", "pp16")
    assert ran["suspects"] == ["toy-slow"]
    assert ran["probability"] >= 0.95
    tests = {test["step"]: test for test in ran["tests"]}
    (ends,) = tests["all of it"]["cells"]
    assert (ends["name"], ends["metric"], ends["model"], ends["verdict"]) == ("pp16", "avg_ts", "m", "slower")
    assert ends["effect"] == pytest.approx(-0.2, abs=0.02)
    assert tests["toy-slow"]["there"] > 0.99
    assert tests["toy-mend"]["there"] < 0.01
    assert many.run("db", "check").out == "ok\n"


def test_a_search_is_repeated_from_the_record(many: Project) -> None:
    """A step that does not compile is tried again, and what was rejected is measured again."""
    words = ("bisect", "0", "5", "--series", "many", "--cell", "pp16")
    first, second = many.json(*words), many.json(*words)
    broken = {test["session"] for ran in (first, second) for test in ran["tests"] if not test["cells"]}
    sessions = [[test["session"] for test in ran["tests"] if test["cells"]] for ran in (first, second)]
    assert sessions[0] == sessions[1]
    assert len(many.json("sessions")) == len(sessions[0]) + len(broken)
    many.ok("session", "reject", sessions[0][0], "--because", "hot")
    assert many.json(*words)["tests"][0]["session"] not in sessions[0]


def test_a_step_that_does_not_compile_is_passed_over(many: Project, checkout: Path) -> None:
    """The slow patch is the broken one: it and the one that mends it are suspected together."""
    toy.git(checkout, "reset", "-q", "--hard", many.machine.pin)
    commit(checkout, "toy : one", "tools/llama-completion.c", "", "int one;\n")
    commit(checkout, "toy : slow", "tools/llama-bench.c", SLOW, f"{SLOW} * 5 / 4\n{BROKEN}")
    commit(checkout, "toy : mend", "tools/llama-bench.c", f"\n{BROKEN}", "")
    commit(checkout, "toy : four", "tools/llama-completion.c", "int one;\n", "int one, four;\n")
    shutil.rmtree(many.folder / "patches" / "many")
    many.ok("patch", "export", "many", "--tree", checkout)
    ran = many.json("bisect", "0", "4", "--series", "many", "--cell", "pp16")
    assert ran["suspects"] == ["toy-slow", "toy-mend"]
    (broken,) = [test for test in ran["tests"] if test["step"] == "toy-slow"]
    assert "#error broken" in broken["reason"]
    assert broken["there"] is None


def test_ends_that_do_not_differ(many: Project) -> None:
    ran = many.run("bisect", "0", "1", "--series", "many", "--cell", "pp16")
    assert (ran.rc, ran.out) == (8, "")
    assert "pp16 does not differ between none and toy-one" in ran.error
    assert "\n  series: - -> many:1\n" in ran.err
    assert ran.err.count("recorded as what to expect") == 2  # of either tree
    assert ran.next.startswith("dgxlab report ")
    ran = many.run("bisect", "3", "3", "--series", "many", "--cell", "pp16")
    assert (ran.rc, ran.next) == (2, "dgxlab patch list")
    assert ran.error == "GOOD and BAD are 3 and 3; they must be two numbers of 0 to 5, the smaller first"
    ran = many.run("bisect", "0", "5", "--series", "many", "--cell", "pp99")
    assert ran.error.endswith("no cell of pp99 in common")
    assert "they have pp16, pp32, tg4" in ran.err
    assert ran.next == "dgxlab bisect 0 5 --series many --cell pp16"
    assert many.run("bisect", "0", "5", "--cell", "pp16").rc == 2
    unsure = many.run("bisect", "0", "5", "--series", "many", "--cell", "pp16", "--confidence", "0.5")
    assert (unsure.rc, "--confidence" in unsure.err, "sending" in unsure.err) == (2, True, False)


def test_one_comparison_of_a_cell_is_judged(many: Project, checkout: Path) -> None:
    """A batched cell has two speeds, and here the patch slows the second alone; two environments share a cell."""
    commit(checkout, "toy : slower streams", "tools/llama-batched-bench.c", "warm_tg = 0.25", "warm_tg = 0.5")
    many.ok("patch", "export", "many", "--tree", checkout)
    batched = "bench: [{batched-bench: {model: m, npp: 16, ntg: 4, npl: [1, 2]}}]"
    spec(many, "stream", STREAM.replace(STREAM.splitlines()[3], batched))
    words = ("bisect", "3", "6", "--series", "many", "--cell")
    refused = many.run(*words, "pp16 tg4 B2")
    assert refused.error == "pp16 tg4 B2 is 2 comparisons: pp16 tg4 B2 S_PP, pp16 tg4 B2 S_TG"
    assert refused.next == "dgxlab bisect 3 6 --series many --cell 'pp16 tg4 B2 S_PP'"
    ran = many.json(*words, "pp16 tg4 B2 S_TG")
    assert ran["suspects"] == ["toy-slower-streams"]
    assert {cell["name"] for test in ran["tests"] for cell in test["cells"]} == {"pp16 tg4 B2 S_TG"}
    each = "llama-bench: {model: m, n_prompt: 16}"
    two = f"bench: [{{{each}}}, {{{each.replace('}', ', env: {TOY_WAY: b}}')}}}]"
    spec(many, "stream", STREAM.replace(STREAM.splitlines()[3], two))
    assert many.run(*words, "pp16").error == "pp16 is 2 comparisons: pp16 -TOY_WAY, pp16 TOY_WAY=b"


def test_a_slow_commit_is_found(project: Project, checkout: Path) -> None:
    commit(checkout, "toy : six", "CMakeLists.txt", "", 'option(GGML_NATIVE "" ON)\n')
    spec(project, "plain", STREAM.replace("series: [many]\n", "cmake: {GGML_NATVE: true}\n"))
    first = project.machine.pin
    words = ("--tree", checkout, "--cell", "tg4", "--like", "plain")
    ran = project.ok("bisect", f"{first[:12]}", "HEAD", *words)
    title, _, head, *rows = ran.out.splitlines()
    assert "toy : slow (tg4 slower -" in title
    assert head.split() == ["step", "there", "verdict", "session"]
    assert "100.0 %" in rows[0]
    begun = re.findall(r"^(the ends|test \d): [0-9a-f]{12} toy : (\w+) against [0-9a-f]{12} ", ran.err, re.MULTILINE)
    assert begun[0] == ("the ends", "six")
    assert ran.err.count("has no cmake option GGML_NATVE") == 1  # the last commit alone names any
    assert [name for name, _ in begun[1:]] == [f"test {number}" for number in range(1, len(rows))]
    backwards = project.run("bisect", "HEAD", first, *words)
    assert (backwards.rc, "has no commits from HEAD to" in backwards.error) == (9, True)


def test_each_patch_is_left_out_once(many: Project) -> None:
    ran = many.ok("ablate", "many", "--cell", "pp16", "--format", "json")
    assert "\nwithout toy-slow: pp16 faster +" in ran.err  # as each session ends
    rows = {row["without"]: row for row in json.loads(ran.out)}
    assert list(rows) == ["toy-one", "toy-break", "toy-mend", "toy-slow", "toy-five"]
    assert rows["toy-slow"]["cells"][0]["verdict"] == "faster"
    assert rows["toy-slow"]["cells"][0]["effect"] == pytest.approx(0.25, abs=0.02)
    assert rows["toy-five"]["cells"][0]["verdict"] in ("same", "inconclusive")
    # the next patch changes its line; without it nothing compiles
    assert "toy-mend.patch conflicts" in rows["toy-break"]["reason"]
    assert "#error broken" in rows["toy-mend"]["reason"]
    assert "toy-five.patch conflicts" in rows["toy-one"]["reason"]
    ran = many.run("ablate", "none")
    assert (ran.rc, ran.next) == (9, "dgxlab patch list")
    many.ok("patch", "export", "spare", "--tree", many.folder.parent / "llama.cpp")
    ran = many.run("ablate", "spare")
    assert (ran.rc, ran.error) == (2, "no experiment applies spare")
    spec(many, "plain", STREAM.replace("series: [many]\n", ""))
    assert many.run("ablate", "many", "--like", "plain").next.endswith("/plain.yaml")


def test_a_new_pin_is_tried_with_every_series(many: Project) -> None:
    """Stock and a series that applies are built, gated and screened; one that does not apply is named, with the way."""
    other = many.checkout(many.folder.parent / "other")
    commit(other, "toy : other", "tools/llama-completion.c", "", 'char * more = "ADDED";\n')
    many.ok("patch", "export", "other", "--tree", other)
    plain = STREAM.replace("series: [many]\n", "")
    spec(many, "plain", plain)
    gate = "gates: [{backend-ops: {op: ADDED, backend: CPU}}]\n"
    spec(many, "added", f"extends: toy.yaml\nseries: [many, other]\n{gate}")
    overlays = "overlay kernels/alone.cuh ggml/alone.cuh\noverlay kernels/test.c tests/test.c\n"
    never = "#error never compiled\n"
    for file, text in (("kernels/alone.cuh", never), ("kernels/test.c", never), ("patches/alone/series", overlays)):
        (many.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (many.folder / file).write_text(text)
    later = many.machine.later
    ran = many.run("pin", "check", later[:12], "--like", "plain")
    assert (ran.rc, ran.next) == (11, f"dgxlab patch refresh many --pin {later} --beside")
    assert "gate MUL_MAT on CPU: passed, 4/4, 1 unsupported" in ran.err
    assert "; recorded as what to expect from now on" in ran.err
    rows = {line.split("  ")[0]: line for line in ran.out.splitlines()}
    counts = "MUL_MAT 4/4, 1 unsupported"
    assert [counts in rows[name] for name in ("stock", "many", "other")] == [True, False, True]
    assert "many: series many: toy-break.patch does not apply" in ran.out
    assert rows["alone"].split() == ["alone", "yes", *"----"]  # it would be stock
    assert ran.error == f"not everything is well on pin {later[:12]}: many"
    assert "next: dgxlab noise" in ran.out  # without known noise nothing can be screened
    many.ok("noise", "plain")
    as_json = many.json("pin", "check", later, "other", "--like", "plain")
    stock, row = as_json["rows"]
    assert (row["series"], row["applies"], row["builds"], row["passed"]) == ("other", True, True, True)
    assert stock["gates"] == {"MUL_MAT": "4/4, 1 unsupported"}
    assert row["gates"] == {**stock["gates"], "ADDED": "4/4, 1 unsupported"}  # llama.cpp as it is has no such operation
    kinds = {each["session"]: each["kind"] for each in many.json("sessions")}
    assert [*kinds.values()] == ["gate", "gate", "noise", "screen", "screen"]  # no gate again on the same builds
    assert [[kinds[each] for each in row["sessions"]] for row in (stock, row)] == [["gate", "screen"]] * 2
    for each in (stock, row):
        assert [subject["name"] for subject, _ in each["verdicts"]] == ["pp16", "pp32", "tg4"]
        assert {verdict["verdict"] for _, verdict in each["verdicts"]} <= {"inconclusive", "same"}
    spec(many, "needs", f"extends: plain.yaml\n{gate}")
    stock, row = many.json("pin", "check", later, "other", "--like", "needs", "--no-screen")["rows"]
    assert (row["passed"], "has no operation ADDED" in stock["reason"]) == (True, True)
    spec(many, "measures", "extends: plain.yaml\nbench: [{backend-ops: {op: ADDED, backend: CPU, where: {n: 8}}}]\n")
    rows = many.json("pin", "check", later, "other", "--like", "measures", "--no-screen")["rows"]
    assert [each["passed"] for each in rows] == [True, True]  # nothing of its bench runs
    assert many.run("pin", "check", many.machine.pin, "--like", "plain").rc == 2
    assert many.run("pin", "check", later, "othr", "--like", "plain").next == "dgxlab patch list"


def test_a_series_that_only_looks_otherwise_applies(many: Project, tmp_path: Path) -> None:
    """A patch that git would write in another way is built all the same, and a note says so."""
    other = many.checkout(tmp_path / "other")
    commit(other, "toy : other", "tools/llama-completion.c", "", "int other;\n")
    many.ok("patch", "export", "other", "--tree", other)
    patch = many.folder / "patches" / "other" / "toy-other.patch"
    patch.write_text(f"{patch.read_text()}-- \n2.0\n\n")
    spec(many, "plain", STREAM.replace("series: [many]\n", ""))
    ran = many.ok("pin", "check", many.machine.later, "other", "--like", "plain", "--no-screen")
    assert [line.split()[1:3] for line in ran.out.splitlines()[2:3]] == [["yes", "yes"]]
    assert "other: toy-other.patch is not as git format-patch writes it" in ran.out


def test_an_invalid_verdict_says_why() -> None:
    why = "the bracket does not count"
    verdict = Verdict("invalid", 1, reasons=(why, "one of 2 screens"))
    assert shown_verdicts([(Subject("pp16", "pp16", "avg_ts", "m"), verdict)]) == [f"pp16 invalid: {why}"]


def test_a_verdict_has_the_interval_that_decided_it() -> None:
    verdict = Verdict("same", 8, (), effect=0.001, ci=(-0.012, 0.014), same_ci=(-0.004, 0.006))
    shown = shown_verdicts([(Subject("pp16", "pp16", "avg_ts", "m"), verdict)])
    assert shown == ["pp16 same +0.10 % (-0.40 to +0.60)"]
