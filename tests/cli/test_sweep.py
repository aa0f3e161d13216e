"""Sweeps: an experiment for each combination of values, each whole on one host."""

import pytest

from tests.cli.conftest import Project

SWEEP = """extends: toy.yaml
matrix: {env: {TOY: [half, noisy]}, cmake: {TOY_NEW: [true, false]}}
bench: [{llama-bench: {model: m, n_prompt: 16}}]
"""
NAMES = ("sweep-half-ON", "sweep-half-OFF", "sweep-noisy-ON", "sweep-noisy-OFF")


@pytest.fixture
def sweep(project: Project) -> Project:
    project.spec("sweep", SWEEP)
    return project


def test_a_sweep_over_two_hosts(sweep: Project) -> None:
    entries = (f"{name}: {{local: true, root: {sweep.folder}/{name}, env: {{TOY_NODE: {name}}}}}\n" for name in "ab")
    with sweep.hosts.open("w") as file:
        file.writelines(entries)
    plans = sweep.json("plan", "sweep")
    assert [plan["name"] for plan in plans] == list(NAMES)
    ran = sweep.ok("run", "sweep", "--host", "a,b")
    rows = [line for line in ran.out.splitlines() if line.startswith("| sweep-")]
    assert [row.split(" | ")[:4] for row in rows] == [
        [f"| {name}", "ab"[number % 2], *name.removeprefix("sweep-").split("-")[::-1]]
        for number, name in enumerate(NAMES)
    ]
    assert "4 experiments on 2 hosts, 4 of 4 experiments measured" in ran.err
    jobs = sweep.run("sessions").out
    again = sweep.ok("run", "sweep", "--host", "b,a")
    assert again.out == ran.out
    assert sweep.run("sessions").out == jobs


def test_a_session_for_each_experiment_of_a_sweep(sweep: Project) -> None:
    sweep.spec("sweep", SWEEP.replace("[true, false]", "true"))
    sweep.spec("stream", "extends: toy.yaml\nbench: [{llama-bench: {model: m, n_prompt: 16}}]\nsession: {cycles: 6}\n")
    ran = sweep.run("ab", "stream", "sweep", "--allow", "session", "--fail-on", "slower")
    assert (ran.rc, ran.error) == (11, "a verdict is slower, on which to fail")
    rows = [line.split(" | ") for line in ran.out.splitlines() if line.startswith("| ")]
    assert rows[0] == ["| experiment", "TOY", "session", "verdict", "m pp16 (%) |"]
    (half,) = (row for row in rows if row[0] == "| sweep-half-ON")
    assert (half[1], *half[3:]) == ("half", "slower", "-50.00 slower |")
    assert "each session is judged by itself" in ran.out


def test_experiments_of_a_host_that_cannot_be_used_are_counted_as_not_measured(sweep: Project) -> None:
    sweep.hosts.write_text("gone: {local: true, root: /dev/null/dgxlab}\n")
    ran = sweep.run("run", "sweep", "--host", "local,gone")
    assert ran.rc == 3
    assert "4 experiments on 2 hosts, 2 of 4 experiments measured; recorded in " in ran.err


@pytest.mark.parametrize("words", [("ab", "sweep", "toy"), ("try", "sweep"), ("watch", "sweep")])
def test_what_takes_one_experiment_refuses_a_sweep(sweep: Project, words: tuple[str, ...]) -> None:
    options = {"ab": (), "watch": ("--tree", "."), "try": ("--tree", ".", "--because", "it waits less")}
    ran = sweep.run(*words, *options[words[0]])
    assert (ran.rc, ran.next) == (9, "dgxlab run experiments/sweep.yaml")
    assert ran.error == "experiments/sweep.yaml:2: matrix: makes several experiments, and one is needed here"
