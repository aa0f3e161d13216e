"""`dgxlab ab`, `noise`, `plan --effect`: verdicts at the end, and not a number of a chain before it."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab.cli._app import Same
from dgxlab.cli._display import Lines
from dgxlab.compare import MUST_AGREE
from dgxlab.model.events import ChainEvent, LockEvent, read
from tests.cli.conftest import Project, Ran, shown_on
from tests.journals import Journal, plan

BENCH = "bench: [{llama-bench: {model: m, n_prompt: [16, 32], n_gen: 4}}]\nsession: {cycles: 6}\n"
STREAM = f"extends: toy.yaml\n{BENCH}"
HALF = "extends: stream.yaml\nhypothesis: half is slower\nenv: {TOY: half}\n"
NOISY = "extends: stream.yaml\nenv: {TOY: noisy}\n"
SLOW = """extends: toy.yaml
bench: [{llama-bench: {model: m, n_prompt: [16, 32], env: {TOY: slow}}}]
session: {cycles: 6}
"""
VALUES = re.compile(r"\b(16[01]\d|1[56]\d\d|32\d\d|31\d\d|799|800|400)(\.\d+)?\b(?! m?s\b)|t/s")
"""What the toy's single stream gives, as it would be shown; `400 ms left` is a duration, and no value."""


@pytest.fixture
def two(project: Project) -> Project:
    """A project with a quick experiment, one at half its speed and one with noise."""
    for name, text in (("stream", STREAM), ("half", HALF), ("noisy", NOISY)):
        project.spec(name, text)
    return project


def test_a_slower_candidate_is_called_slower(two: Project) -> None:
    """The report on stdout with both arms; on stderr what differs, a line a run, and the session's word."""
    ran = two.run("ab", "stream", "half", "--fail-on", "faster")
    assert ran.rc == 0
    title, *rest = ran.out.splitlines()
    assert re.fullmatch(r"# Session \d{8}-\d{6}-stream-vs-half-[0-9a-f]{6}: A/B of half against stream", title)
    assert "**slower: 3 of 3 slower**" in rest
    assert "| env TOY | - | half |" in rest
    (row,) = [line for line in rest if line.startswith("| pp16 |")]
    assert row == "| pp16 | slower | -50.00 | -50.00 to -50.00 | 1600 ± 0 (7) | 799.8 ± 0 (6) | no |"
    assert [line for line in rest if "] baseline" in line or "] candidate" in line] == [
        "- [1] baseline stream",
        "- [2] candidate half",
    ]
    assert "  env TOY: - -> half" in ran.err.splitlines()
    assert ran.err.endswith(f"\nslower: 3 of 3 slower; recorded in {two.folder}/results.db\n")
    _says_no_value_before_the_end(ran)
    assert two.run("report", "stream-vs-half").out == ran.out
    alone = two.run("report", "half")
    assert (alone.rc, alone.next) == (2, "dgxlab report stream-vs-half")
    assert "'stream-vs-half'" in alone.error
    assert two.run("db", "check").out == "ok\n"


def _says_no_value_before_the_end(ran: Ran) -> None:
    """A line a run: which, in what place, how the baselines agree, what counts; nothing that was measured.

    How long a run took is what was measured too, as soon as there are two arms.
    """
    runs = [line for line in ran.err.splitlines() if line.startswith("chain:0")]
    assert len(runs) == 4 + 1 + 2 * 6
    assert runs[0].startswith("chain:0 llama-bench burn-in 1 (")
    assert runs[4].startswith("chain:0 llama-bench first baseline")
    assert re.match(r"chain:0 llama-bench cycle 3 of 6, candidate.*: [\w. ]+ left$", runs[9])
    assert [line for line in runs[4:] if re.search(r"\d m?s\b", line.rpartition(": ")[0])] == []
    assert re.search(r"cycle 6 of 6, baseline.*: baselines 0\.00 % apart, 6 of 6 count, done$", runs[-1])
    assert [line for line in ran.err.splitlines() if VALUES.search(line)] == []
    assert VALUES.search(ran.out)
    gates = [line for line in ran.err.splitlines() if line.startswith("gate ")]
    before = [f"gate MUL_MAT on CPU of {arm}" for arm in ("stream", "half")]
    assert [line.split(":")[0] for line in gates] == [*before, *(f"{line}, after the chains" for line in before)]


def test_a_terminal_gets_the_same_lines_above_a_bar(two: Project) -> None:
    """And no value either."""
    terminal, end = pty.openpty()
    child = two.spawn("ab", "stream", "half", stderr=end, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"})
    os.close(end)
    seen = shown_on(terminal)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, "**slower: 3 of 3 slower**" in out) == (0, True)
    text = seen.decode()
    assert "chain:0 llama-bench cycle 6 of 6, baseline" in text
    assert "/17" in text
    assert " 0/17 " not in text  # the gates after the chain have no such count
    assert not VALUES.search(text)


def test_noise_tells_the_floor_and_what_can_be_seen(two: Project) -> None:
    """An A/A session's floors are what `plan --effect`, screens and promotion go by."""
    ran = two.run("noise", "noisy", "--wide")
    assert ran.rc == 0
    assert ": A/A of noisy " in ran.out.splitlines()[0]
    assert "| noise floor (%) |" in ran.out
    assert "promoted" not in ran.out
    floor = json.loads(two.run("report", "noisy-vs-noisy", "--format", "json").out)["tables"][1]["rows"][0][
        "noise_floor_pct"
    ]
    assert 0 < floor < 2
    plan = two.run("plan", "experiments/noisy.yaml", "--effect", "50%")
    assert plan.rc == 0
    assert re.search(r"(?m)^planned: 6 cycles, about ", plan.out)
    assert re.search(r"(?m)^needed for 50 %: \d+ cycles, about ", plan.out)
    assert (
        json.loads(two.run("plan", "experiments/noisy.yaml", "--effect", "0.5", "--format", "json").out)["effect"]
        == 0.5
    )
    chosen = two.run("plan", "experiments/noisy.yaml", "experiments/half.yaml", "--set", "session.effect=50%")
    assert re.search(r"^planned: 8 cycles, about .*; the burn-in ", chosen.out.splitlines()[-1])
    judged = two.run("ab", "noisy", "half", "--screen", "--fail-on", "inconclusive", "--fail-on", "slower", "-q")
    assert (judged.rc, judged.error.split(",")[0]) == (11, "screen: 3 verdicts of 3 are slower")
    screen = two.run("ab", "noisy", "half", "--screen", "--set", "env.TOY=noisy")
    assert screen.rc == 0
    assert ": screen of half " in screen.out.splitlines()[0]
    assert "screen: " in screen.out.split("| verdict |")[1]


def test_what_no_session_has_measured_is_listed(two: Project, record: Path) -> None:
    """With the command that measures it; a screen without a floor is refused."""
    shutil.copyfile(record, two.folder / "results.db")
    plan = two.run("plan", "experiments/stream.yaml", "--effect", "2%")
    assert plan.out.splitlines()[-2:] == [
        "no noise floor: pp16, pp32, tg4",
        "measured by: dgxlab noise experiments/stream.yaml --host local",
    ]
    screen = two.run("ab", "stream", "half", "--screen")
    assert (screen.rc, screen.out) == (8, "")
    assert screen.next.startswith("dgxlab noise ")
    assert two.run("plan", "experiments/stream.yaml", "--effect", "2").rc == 2


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (("--set", "session.cycles=5"), "5 cycles are too few for this session of 3 claims, which needs 6"),
        (("--set", "session.effect=0"), "--set: session.effect: must be more than 0"),
        (("--max-minutes", "0"), "0 minutes are no time to measure in"),
        (("--max-minutes", "5"), "a limit of minutes has no say here: session.cycles fixes the number"),
    ],
)
def test_a_session_that_could_claim_nothing_is_refused(two: Project, words: tuple[str, ...], cause: str) -> None:
    """Before anything is built or measured."""
    ran = two.run("ab", "stream", "half", *words)
    assert (ran.rc, ran.out) == (9, "")
    assert cause in ran.error
    assert "runs on local" not in ran.err


def test_the_burn_in_decides_how_many_cycles_there_are(two: Project) -> None:
    """Eight runs of the baseline first; how many cycles follow is told before the first of them."""
    ran = two.run("ab", "stream", "half", "--set", "session.effect=2%", "--max-minutes", "60")
    assert ran.rc == 0
    runs = [line for line in ran.err.splitlines() if line.startswith("chain:0")]
    assert [" burn-in " in line for line in runs[:10]] == [True] * 9 + [False]
    assert runs[8].endswith("8 cycles, to find 0 %")
    assert len(runs) == 8 + 1 + 1 + 2 * 8
    assert "**slower: 3 of 3 slower**" in ran.out


def test_a_job_that_fails_has_its_own_exit_code(two: Project) -> None:
    """The candidate crashes: its error, after a report in which the verdicts are invalid; 11 where that was asked."""
    two.spec("crash", "extends: stream.yaml\nenv: {TOY: crash}\n")
    ran = two.run("ab", "stream", "crash", "--fail-on", "slower", "--wide")
    assert ran.rc == 8
    asked = two.run("ab", "stream", "crash", "--fail-on", "invalid")
    assert asked.rc == 11
    assert f"error: {ran.error}" in asked.err
    assert "error: 3 verdicts of 3 are invalid" in asked.err
    assert "**invalid: 3 of 3 invalid**" in ran.out
    assert "candidate 1 failed: " in ran.out


def test_an_unknown_name_is_told_the_nearest(two: Project) -> None:
    """And the command that lists them; a path that is not there is the spec reader's word."""
    ran = two.run("ab", "stream", "halff")
    assert (ran.rc, ran.out) == (9, "")
    assert ("'halff'" in ran.error, ran.error.endswith(" 'half'")) == (True, True)
    assert ran.next == "ls -R experiments"
    assert two.run("plan", "halff").error == ran.error
    assert two.run("plan", "stream", "half").out == two.run("plan", "stream", "experiments/half.yaml").out != ""
    assert two.run("noise", "experiments/nope.yaml").rc == 9


def test_a_name_is_found_in_a_folder_of_experiments(two: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder below too, with `extends` from the file's own; two files of one name are refused."""
    deep = two.folder / "experiments" / "deep"
    deep.mkdir()
    (deep / "deeper.yaml").write_text("extends: ../half.yaml\n")
    planned = two.run("plan", "deeper")
    assert (planned.rc, planned.out) == (0, two.run("plan", "experiments/deep/deeper.yaml").out)
    assert two.run("plan", "experiments/deeper.yaml").out == planned.out  # as before it was put into its folder
    (two.folder / "experiments" / "of.yaml").write_text("extends: deeper.yaml\nname: deeper\n")
    assert two.run("plan", "of").rc == 0
    (deep / "half.yaml").write_text("extends: ../half.yaml\n")
    ran = two.run("plan", "half")
    assert (ran.rc, ran.out) == (9, "")
    assert ran.error.startswith("experiments/deep/half.yaml and experiments/half.yaml ")
    assert ran.next == "dgxlab plan experiments/deep/half.yaml"
    assert two.run("plan", "experiments/half.yaml").rc == 0
    monkeypatch.chdir(deep)
    assert two.run("plan", "deeper").out == planned.out


def test_arms_that_measure_something_else_are_refused(two: Project) -> None:
    """Unless it is allowed by name."""
    two.spec("more", "extends: stream.yaml\nbench: [{llama-bench: {model: m, n_prompt: [16, 64], n_gen: 4}}]\n")
    refused = two.run("ab", "stream", "more")
    assert (refused.rc, "--allow matrix" in refused.error) == (9, True)
    allowed = two.run("plan", "stream", "more", "--allow", "matrix")
    assert (allowed.rc, "  2 cells: pp16, tg4\n" in allowed.out) == (0, True)
    assert tuple(Same) == MUST_AGREE


def test_an_arm_by_another_name_is_no_aa_session(two: Project) -> None:
    """Two arms, as far as anybody knows: only an experiment against itself is called that."""
    two.spec("renamed", "extends: stream.yaml\n")
    first = two.run("ab", "stream", "renamed", "--host", "nowhere").err.splitlines()[1]
    assert first.startswith("renamed against stream: ")
    again = two.run("ab", "stream", "stream", "--host", "nowhere").err
    assert again.startswith(f"{two.where}stream against stream: nothing differs, an A/A session\n")


def test_plan_shows_what_ab_would_do(two: Project) -> None:
    """Both arms' commands, the order of the runs, and how often."""
    ran = two.run("plan", "experiments/stream.yaml", "experiments/half.yaml")
    assert ran.rc == 0
    chain = ran.out.split("[chain:0] ")[1].splitlines()
    assert chain[:7] == [
        "17 to 33 runs of at most 30 min 00 s each",
        "  baseline stream",
        "  {bin}/llama-bench -m {model:m} -p 16,32 -n 4 -r 6 -o jsonl",
        "  candidate half",
        "  TOY=half {bin}/llama-bench -m {model:m} -p 16,32 -n 4 -r 6 -o jsonl",
        "  3 cells: pp16, pp32, tg4",
        "  order: burn-in of the baseline, then A B A ... B A with 6 B, and at most 2 cycles more for those that do not"
        " count",
    ]
    assert ran.out.splitlines()[-1].endswith("steps, 3 cells")


def test_a_session_that_goes_on_shows_how_far_it_is(two: Project) -> None:
    """Ctrl-C leaves it running; its report has no number of it, jobs says what it is, cancel makes it invalid."""
    two.spec("slow", SLOW)
    child = two.spawn("ab", "slow", "slow")
    job = _interrupt(child)
    shown = two.run("report", job)
    assert "has not ended" in shown.out
    assert "- chain:0 llama-bench m: " in shown.out
    assert not VALUES.search(shown.out)
    assert two.run("logs", job).rc == 2
    (row,) = [row for row in json.loads(two.run("jobs", "--format", "json").out) if row["job"] == job]
    assert (row["on_host"], row["kind"], row["name"]) == ("running", "ab", "slow-vs-slow")
    assert two.run("cancel", job).rc == 0
    attached = two.run("attach", job)
    assert attached.rc == 130
    assert attached.next == "dgxlab ab experiments/slow.yaml experiments/slow.yaml --host local"
    assert "**invalid: 2 of 2 invalid**" in attached.out


def _interrupt(child: subprocess.Popen[str]) -> str:
    """Press Ctrl-C after the first run of a chain, and return the job's id."""
    assert child.stderr
    job = ""
    while not (line := child.stderr.readline()).startswith("chain:0"):
        assert line
        job = line.split()[1] if line.endswith("runs on local\n") else job
    os.killpg(child.pid, signal.SIGINT)
    child.communicate(timeout=60)
    assert child.returncode == 130
    return job


def test_a_line_of_a_chain_says_what_is_wrong_with_it() -> None:
    """A failed run, a cooling device, an end without a run; and no run of a chain is told twice."""
    shown_lines = Lines()
    event = ChainEvent(
        id="chain:1",
        state="running",
        role="baseline",
        cycle=2,
        cycles=8,
        done=7,
        total=19,
        valid=1,
        drift=0.0123,
        conditions={"clocks.sm": (1965, 1980)},
        left_s=90.0,
        note="cycle 2 does not count: baseline 2 failed: killed by SIGKILL",
    )
    run = read(Journal(plan("J")).run(chain="chain:1", role="baseline", cycle=2, seconds=12.34).events[0])
    assert shown_lines.of(run) == []
    assert shown_lines.of(event) == [
        "chain:1 llama-bench cycle 2 of 8, baseline (SM 1965 to 1980 MHz): baselines 1.23 % apart, 1 of 2 "
        "count, 1 min 30 s left; cycle 2 does not count: baseline 2 failed: killed by SIGKILL"
    ]
    burn_in = replace(event, state="burn-in", role="burn-in", drift=None, note="")
    assert shown_lines.of(run) == []
    assert shown_lines.of(burn_in) == ["chain:1 llama-bench burn-in 2 (12.3 s, SM 1965 to 1980 MHz): 1 min 30 s left"]
    warm = {"temperature.gpu": (70.0, 70.0)}
    assert shown_lines.of(replace(event, state="cooling", conditions=warm, note="cooling from 70.0 °C to 50.0 °C")) == [
        "chain:1 cooling from 70.0 °C to 50.0 °C, 70 °C"
    ]
    assert shown_lines.of(replace(event, state="done", conditions={}, note="the device did not cool")) == [
        "chain:1 the device did not cool"
    ]


@pytest.mark.parametrize(
    ("state", "path", "owner", "lines"),
    [
        ("waiting", "/l", "job J of alice", ["waiting for the device: /l is held by job J of alice"]),
        ("unwatched", "/o", "no folder", ["the lock file /o is neither read nor signed: no folder"]),
        ("held", "/l", "", []),
    ],
)
def test_waiting_is_said(state: str, path: str, owner: str, lines: list[str]) -> None:
    """What is held, and by whom."""
    assert Lines().of(LockEvent(state=state, path=path, owner=owner)) == lines
