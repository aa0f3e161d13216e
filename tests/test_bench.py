"""The program that measures this program: its shape, not its numbers."""

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from bench import words
from bench.figure import figure, take_turns
from bench.place import remove
from bench.shape import shape
from tests.conftest import PROJECT
from tests.repos import git


def test_one_quick_figure_as_json_and_a_row() -> None:
    """On stdout one object with the figure, its reach and the machine; the table goes to stderr."""
    argv = [sys.executable, "-m", "bench", "--only", "ingest", "--quick"]
    ran = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=True)
    printed = json.loads(ran.stdout)
    (only,) = printed["figures"]
    assert (only["name"], only["unit"], only["reach"], only["n"]) == ("ingest", "s", 2.0, 2)
    assert only["value"] > 0
    assert math.isfinite(only["spread"])
    assert set(only["parts"]) == {"one_run", "small_runs", "small_runs_in_pieces", "small_runs_of_a_gpu"}
    assert only["reached"] is (only["value"] <= only["reach"])
    assert only["others_cpus"] >= 0
    assert printed["quick"] is True
    assert printed["machine"]["cpus"] > 0
    assert ran.stderr.splitlines()[-1].startswith("ingest ")


def test_a_folder_that_is_still_written_to_is_removed(tmp_path: Path) -> None:
    """What a killed client began on the host writes on for a moment."""
    folder = tmp_path / "place"
    folder.mkdir()
    writing = "i=0; while [ $i -lt 3000 ]; do : > $i || exit; i=$((i + 1)); done"
    with subprocess.Popen(["sh", "-c", writing], cwd=folder, stderr=subprocess.DEVNULL):
        while not any(folder.iterdir()):
            pass
        remove(folder)
    assert not folder.exists()


def test_sides_take_turns() -> None:
    """A B A B, so that what slows the machine down slows both."""
    turns = itertools.count()
    assert take_turns(2, lambda: next(turns), lambda: next(turns)) == [[0, 2], [1, 3]]


def test_a_figure_is_the_median_of_its_turns() -> None:
    """One wild turn does not move it, and a single turn has no spread, which is not a spread of 0."""
    measured = figure("x", "what", [1.0, 9.0, 1.1], "x", 1.2, ours=[2.0, 18.0, 2.2])
    assert (measured.value, measured.n, measured.reached, measured.parts) == (1.1, 3, True, {"ours": 2.2})
    assert measured.spread == pytest.approx(0.14826)
    assert figure("x", "what", [2.0], "x", 1.2).spread is None
    assert not figure("x", "what", [2.0], "x", 1.2).reached


def test_the_house_is_counted(tmp_path: Path) -> None:
    """Modules, helpers named once, and tests that quote a sentence; a name in another's does not count."""
    for folder, text in (
        (
            "dgxlab",
            "LLAMA = 'llama-bench'\n\n\ndef _once():\n    pass\n\n\ndef use():\n    return _once() or _once_more()\n",
        ),
        (
            "tests",
            "def test_a():\n    assert x == 'one two three four'\n\n\ndef test_b():\n    assert x == 'one two'\n",
        ),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "module.py").write_text(text)
    counts = shape(tmp_path)
    assert (counts["modules"], counts["functions"], counts["private helpers named once"]) == ("1", "2", "1")
    assert (counts["tests"], counts["tests that quote prose"]) == ("2", "50 %")
    assert (counts["modules that name llama-bench"], counts["modules that name harness"]) == ("1", "0")


def test_words_to_avoid_are_found_and_not_used(tmp_path: Path) -> None:
    """In tracked texts, by line, with what to write instead."""
    avoid = words.rules(words.PROJECT)
    planted = "no" + "body"
    git(tmp_path, "init", "-q")
    (tmp_path / "a.md").write_text(f"A line.\nIt is read by {planted}.\n")
    (tmp_path / "b.txt").write_text(planted)
    git(tmp_path, "add", ".")
    assert [hit.split(": ")[0] for hit in words.places(tmp_path, avoid)] == ["a.md:2"]
    assert list(words.places(words.PROJECT, avoid)) == []
