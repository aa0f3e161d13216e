"""Working trees of llama.cpp: measured under a name of their own, and traced by the changes that are kept."""

import subprocess
from pathlib import Path

import pytest

from tests import toy
from tests.cli.conftest import Project

STOCK = "extends: toy.yaml\nbench: [{llama-bench: {model: m, n_prompt: 16}}]\nsession: {cycles: 6}\n"


@pytest.fixture
def checkout(project: Project, tmp_path: Path) -> Path:
    """Return a checkout whose llama-bench prints half the speed."""
    project.spec("stock", STOCK)
    folder = project.checkout(tmp_path / "llama.cpp")
    edit(folder, 2)
    return folder


def edit(checkout: Path, times: int) -> None:
    """Let the checkout's llama-bench say that each repetition took so many times as long."""
    toy.git(checkout, "checkout", "-q", ".")
    program = checkout / "tools" / "llama-bench.c"
    text = program.read_text()
    assert "10000000" in text
    program.write_text(text.replace("10000000", f"{times}0000000"))


def test_a_working_tree_against_stock(project: Project, checkout: Path, tmp_path: Path) -> None:
    project.ok("run", "stock")
    (first,) = project.json("report", "stock")["tables"][0]["provenance"]["sessions"]
    ran = project.ok("ab", "stock", "--tree", checkout)
    title = ran.out.splitlines()[0]
    (tree,) = {word for word in title.replace(":", " ").split() if word.startswith("stock-tree-")}
    assert title.endswith(f": A/B of {tree} against stock")
    assert "2 changed lines since pin" in ran.err
    assert "| pp16 | slower |" in ran.out
    assert "**working tree** as it was on the disk" in ran.out
    assert "working tree" not in project.ok("report", "stock").out
    # the changes are in the record: they make the checkout again
    session = title.split()[2].rstrip(":")
    kept = tmp_path / "kept.patch"
    kept.write_text(project.ok("session", "diff", session[-6:]).out)
    again = project.checkout(tmp_path / "again")
    subprocess.run(["git", "-C", again, "apply", kept], check=True)
    assert toy.git(again, "diff") == toy.git(checkout, "diff")
    assert project.json("session", "diff", session) == {tree: kept.read_text()}
    assert project.run("db", "check").out == "ok\n"
    clean = project.run("session", "diff", first)
    assert (clean.rc, clean.out, "built no changed checkout" in clean.error) == (2, "", True)


def test_a_dirty_run_does_not_take_over_the_experiment(project: Project, checkout: Path) -> None:
    project.ok("run", "stock")
    before = project.ok("report", "stock").out
    ran = project.ok("run", "stock", "--tree", checkout)
    assert ran.out.startswith("# Experiment stock-tree-")
    assert project.ok("report", "stock").out == before
    assert project.ok("report", ran.out.split()[2]).out == ran.out
    # another state of the checkout is another experiment, the same state is up to date
    assert "0 measured now" in project.ok("run", "stock", "--tree", checkout).err
    edit(checkout, 3)
    other = project.ok("run", "stock", "--tree", checkout)
    assert other.out.split()[2] != ran.out.split()[2]
    assert "0 up to date" in other.err


def test_two_working_trees(project: Project, checkout: Path, tmp_path: Path) -> None:
    """Without a name they are measured with the experiment `stock`."""
    other = project.checkout(tmp_path / "other")
    edit(other, 3)
    ran = project.ok("ab", "--tree", checkout, "--tree", other)
    names = [line.split()[-1] for line in ran.out.splitlines() if "] baseline" in line or "] candidate" in line]
    assert len({name for name in names if name.startswith("stock-tree-")}) == 2
    assert "| pp16 | slower |" in ran.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stock"], "needs two experiments, or one and a --tree"),
        ([], "needs two experiments, or one and a --tree"),
        (["--tree", "x"], "needs two experiments, or one and a --tree"),
        (["--tree", "x", "--tree", "y", "--tree", "z"], "compares two checkouts"),
        (["stock", "--tree", "nowhere"], "nowhere is not a git checkout"),
    ],
)
def test_trees_that_make_no_session(project: Project, words: list[str], message: str) -> None:
    project.spec("stock", STOCK)
    ran = project.run("ab", *words)
    assert (ran.rc in (2, 9), message in ran.error) == (True, True), ran.err
