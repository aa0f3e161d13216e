"""`dgxlab ab`, `noise`, `plan --effect`: verdicts at the end, and not a number of a chain before it."""

import json
import os
import pty
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dgxlab import stats
from dgxlab.cli._display import Lines
from dgxlab.cli._terminal import Bar
from dgxlab.cli.run import Same
from dgxlab.compare import MUST_AGREE
from dgxlab.model.events import ChainEvent, LockEvent, StepEvent, read
from dgxlab.units import EARLIER
from tests.cli.conftest import Project, shown_on
from tests.cli.test_jobs import interrupt
from tests.journals import Journal, chain_step, plan, session_plan, source

BENCH = "bench: [{llama-bench: {model: m, n_prompt: [16, 32], n_gen: 4}}]\nsession: {cycles: 6}\n"
SPECS = {
    "stream": f"extends: toy.yaml\n{BENCH}",
    "half": "extends: stream.yaml\nhypothesis: half is slower\nenv: {TOY: half}\n",
    "noisy": "extends: stream.yaml\nenv: {TOY: noisy}\n",
}
SLOW = """extends: toy.yaml
bench: [{llama-bench: {model: m, n_prompt: [16, 32], env: {TOY_MS: "2000"}}}]
session: {cycles: 6}
"""
UNTIL = "it goes on by itself, or gives up after 1 h 00 min"
VALUES = re.compile(r"\b(16[01]\d|1[56]\d\d|32\d\d|31\d\d|799|800|400)(\.\d+)?\b(?! m?s\b)|t/s")
"""What the toy's single stream gives, as it would be shown; `400 ms left` is a duration, and no value."""


@pytest.fixture
def two(project: Project) -> Project:
    for name, text in SPECS.items():
        project.spec(name, text)
    return project


def test_a_slower_candidate_is_called_slower(two: Project) -> None:
    """On stderr a line a run without any value: how long a run of either arm took would be one, too."""
    ran = two.ok("ab", "stream", "half", "--fail-on", "faster")
    title, *rest = ran.out.splitlines()
    assert re.fullmatch(r"# Session \d{8}-\d{6}-stream-vs-half-[0-9a-f]{6}: A/B of half against stream", title)
    row = "| pp16 | slower | -50.00 | -50.00 to -50.00 | 1600 ± 0 (7) | 799.8 ± 0 (6) | no |"
    assert {"**slower: 3 of 3 slower**", "| env TOY | - | half |", row} <= set(rest)
    arms = [line for line in rest if "] baseline" in line or "] candidate" in line]
    assert arms == ["- [1] baseline stream", "- [2] candidate half"]
    lines = ran.err.splitlines()
    assert "  env TOY: - -> half" in lines
    assert ran.err.endswith(f"\nslower: 3 of 3 slower; recorded in {two.folder}/results.db\n")
    runs = [line for line in lines if line.startswith("chain:0")]
    assert len(runs) == 4 + 1 + 2 * 6
    assert runs[0].startswith("chain:0 llama-bench burn-in 1 (")
    assert runs[4].startswith("chain:0 llama-bench first baseline")
    assert re.match(r"chain:0 llama-bench cycle 3 of 6, candidate.*: [\w. ]+ left$", runs[9])
    assert [line for line in runs[4:] if re.search(r"\d m?s\b", line.rpartition(": ")[0])] == []
    assert re.search(r"cycle 6 of 6, baseline.*: baselines 0\.00 % apart, 6 of 6 count, done$", runs[-1])
    assert [line for line in lines if VALUES.search(line)] == []
    assert VALUES.search(ran.out)
    before = [f"gate MUL_MAT on CPU of {arm}" for arm in ("stream", "half")]
    gates = [line.split(":")[0] for line in lines if line.startswith("gate ")]
    assert gates == [*before, *(f"{line}, after the chains" for line in before)]
    assert two.run("report", "stream-vs-half").out == ran.out
    alone = two.ok("report", "half").out
    assert (alone.splitlines()[0], "| 799.8 " in alone) == ("# Experiment half", True)
    assert two.ok("run", "half").out == alone
    session = title.split()[2].rstrip(":")
    by_form = two.run("report", "stream-vs-half", "--form", "single-stream")
    assert (by_form.rc, by_form.next) == (2, f"dgxlab report --form verdicts {session}")
    assert two.ok(*by_form.next.split()[1:]).out.startswith("**slower: 3 of 3 slower**")
    assert two.run("db", "check").out == "ok\n"


def test_a_terminal_gets_the_same_lines_above_a_bar(two: Project) -> None:
    terminal, end = pty.openpty()
    child = two.spawn("ab", "stream", "half", stderr=end, env={**os.environ, "TERM": "xterm", "COLUMNS": "200"})
    os.close(end)
    text = shown_on(terminal).decode()
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, "**slower: 3 of 3 slower**" in out) == (0, True)
    assert "chain:0 llama-bench cycle 6 of 6, baseline" in text
    assert "/17" in text
    assert " 0/17 " not in text  # the gates after the chain have no such count
    assert not VALUES.search(text)


def test_noise_tells_the_floor_and_what_can_be_seen(two: Project) -> None:
    ran = two.ok("noise", "noisy", "--wide")
    assert ": A/A of noisy " in ran.out.splitlines()[0]
    assert "| noise (%) | noise floor (%) |" in ran.out
    assert "promoted" not in ran.out
    too_short = "it took less than 0.2 s, too short to see whether other programs used its processors: raise its"
    plain = two.ok("report", "noisy-vs-noisy").out
    assert [" ".join(text.split()).count(too_short) for text in (ran.out, plain, ran.err)] == [1, 1, 1]
    assert "1 flag" not in plain
    (burn_in,) = (line for line in ran.err.splitlines() if too_short in line)
    assert burn_in.startswith("chain:0 llama-bench burn-in ")
    report = two.json("report", "noisy-vs-noisy")
    floors = [row["noise_floor_pct"] for row in report["tables"][1]["rows"]]
    planned = two.ok("plan", "experiments/noisy.yaml", "--effect", "50%")
    assert re.search(r"(?m)^planned: 6 cycles, about ", planned.out)
    assert re.search(r"(?m)^needed for 50 %: \d+ cycles, about ", planned.out)
    as_json = two.run("plan", "experiments/noisy.yaml", "--effect", "0.5", "--format", "json")
    expected = json.loads(as_json.out)
    claims = expected["claims"]
    assert expected["effect"] == 0.5
    assert [100 * claim["floor"] for claim in claims] == pytest.approx(floors)
    assert [claim["mde"] for claim in claims] == [stats.mde(claim["floor"], 6, 3) for claim in claims]
    chosen = two.run("plan", "experiments/noisy.yaml", "experiments/half.yaml", "--set", "session.effect=50%")
    assert re.search(r"^planned: 8 cycles, about .*; the burn-in ", chosen.out.splitlines()[-1])
    judged = two.run("ab", "noisy", "half", "--screen", "--fail-on", "inconclusive", "--fail-on", "slower", "-q")
    assert (judged.rc, judged.error.split(",")[0]) == (11, "3 screen verdicts of 3 are slower")
    screen = two.run("ab", "noisy", "half", "--screen", "--set", "env.TOY=noisy")
    assert (screen.rc, ": screen of half " in screen.out.splitlines()[0]) == (0, True)
    assert " (screen)" in screen.out.split("| verdict |")[1]


def test_what_no_session_has_measured_is_listed(two: Project, record: Path) -> None:
    shutil.copyfile(record, two.folder / "results.db")
    planned = two.run("plan", "experiments/stream.yaml", "--effect", "2%")
    measured_by = "measured by: dgxlab noise experiments/stream.yaml --host local"
    assert planned.out.splitlines()[-2:] == ["no noise floor: pp16, pp32, tg4", measured_by]
    screen = two.run("ab", "stream", "half", "--screen")
    assert (screen.rc, screen.out) == (8, "")
    assert screen.next.startswith("dgxlab noise ")
    assert two.run("plan", "experiments/stream.yaml", "--effect", "2").rc == 2


@pytest.mark.parametrize(
    ("words", "rc", "cause"),
    [
        ("--set session.cycles=5", 9, "5 cycles are too few for this session of 3 claims, which needs 6"),
        (
            "--set session.effect=0",
            9,
            "--set: session.effect: must be a share between 0 and 1, as in 2% or 0.02, not 0",
        ),
        ("--max-minutes 0", 2, "0 minutes are no time to measure in"),
        ("--max-minutes=-3", 2, "-3 minutes are no time to measure in"),
        ("--max-minutes 5", 9, "--max-minutes has nothing to shorten: session.cycles fixes the number"),
    ],
)
def test_a_session_that_could_claim_nothing_is_refused(two: Project, words: str, rc: int, cause: str) -> None:
    ran = two.run("ab", "stream", "half", *words.split())
    assert (ran.rc, ran.out, cause in ran.error, "runs on local" in ran.err) == (rc, "", True, False)
    assert not words.startswith("--max-minutes") or ran.next == "dgxlab ab stream half"


def test_the_next_command_sets_enough_cycles(two: Project) -> None:
    ran = two.run("ab", "stream", "half", "--set", "session.cycles=5", "--set", "env.TOY=noisy")
    assert ran.next == "dgxlab ab stream half --set env.TOY=noisy --set session.cycles=6"


def test_the_burn_in_decides_how_many_cycles_there_are(two: Project) -> None:
    ran = two.ok("ab", "stream", "half", "--set", "session.effect=2%", "--max-minutes", "60")
    runs = [line for line in ran.err.splitlines() if line.startswith("chain:0")]
    assert [" burn-in " in line for line in runs[:10]] == [True] * 9 + [False]
    assert runs[8].endswith("8 cycles, to find 0 %")
    assert len(runs) == 8 + 1 + 1 + 2 * 8
    assert "**slower: 3 of 3 slower**" in ran.out
    short = ("stream", "half", "--set", "session.effect=2%", "--max-minutes", "0.001")
    for command in ("ab", "plan"):  # before anything is built
        refused = two.run(command, *short)
        assert (refused.rc, " are too short: by its earlier runs this session takes " in refused.error) == (9, True)
        assert refused.next == f"dgxlab {command} stream half --set session.effect=2% --max-minutes 1"


def test_a_job_that_fails_has_its_own_exit_code(two: Project) -> None:
    two.spec("crash", "extends: stream.yaml\nenv: {TOY: crash}\n")
    ran = two.run("ab", "stream", "crash", "--fail-on", "slower", "--wide")
    asked = two.run("ab", "stream", "crash", "--fail-on", "invalid")
    assert (ran.rc, asked.rc) == (8, 11)
    assert f"error: {ran.error}" in asked.err
    assert "error: 3 verdicts of 3 are invalid" in asked.err
    assert "**invalid: 3 of 3 invalid**" in ran.out
    assert "candidate 1 failed: " in ran.out


def test_an_unknown_name_is_told_the_nearest(two: Project) -> None:
    ran = two.run("ab", "stream", "halff")
    assert (ran.rc, ran.out, ran.next) == (9, "", "ls -R experiments")
    assert ("'halff'" in ran.error, ran.error.endswith(" 'half'")) == (True, True)
    assert two.run("plan", "halff").error == ran.error
    assert two.run("plan", "stream", "half").out == two.run("plan", "stream", "experiments/half.yaml").out != ""
    assert two.run("noise", "experiments/nope.yaml").rc == 9


def test_a_name_is_found_in_a_folder_of_experiments(two: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder below too, with `extends` from the file's own; two files of one name are refused."""
    deep = two.folder / "experiments" / "deep"
    deep.mkdir()
    two.spec("deep/deeper", "extends: ../half.yaml\n")
    planned = two.run("plan", "deeper")
    assert (planned.rc, planned.out) == (0, two.run("plan", "experiments/deep/deeper.yaml").out)
    assert two.run("plan", "experiments/deeper.yaml").out == planned.out  # as before it was put into its folder
    two.spec("of", "extends: deeper.yaml\n")
    two.ok("plan", "of")
    two.spec("deep/half", "extends: ../half.yaml\n")
    ran = two.run("plan", "half")
    assert (ran.rc, ran.out) == (9, "")
    assert ran.next == "mv -n experiments/deep/half.yaml experiments/deep/half-deep.yaml"
    monkeypatch.chdir(deep)
    assert two.run("plan", "deeper").out == planned.out


def test_a_file_with_the_name_of_another_is_refused(two: Project) -> None:
    """Their results would be those of one experiment. A file that cannot be read hinders no other."""
    two.spec("unread", "name: [\n")
    two.spec("third", "extends: half.yaml\n\nname: stream\n")
    message = "experiments/third.yaml:3: name: must be the file's, 'third': results are kept by name"
    for words in (("run", "third"), ("ab", "stream", "third"), ("plan", "experiments/third.yaml")):
        ran = two.run(*words)
        assert (ran.rc, ran.out) == (9, "")
        assert ran.error == f"{message}, and 'stream' is experiments/stream.yaml"
        assert ran.next.endswith(" experiments/third.yaml")
    two.spec("third", "extends: half.yaml\n\nname: thrid\n")
    assert two.run("ab", "stream", "third").error == message
    two.spec("third", "extends: half.yaml\nmatrix: {env: {TOY: [half, noisy]}}\nname: stream\n")
    assert two.run("run", "third").error.endswith(" is experiments/stream.yaml")
    assert two.run("plan", "stream", "--set", "name=half").error.endswith(" is experiments/half.yaml")
    two.ok("plan", "stream", "half")
    (two.folder / "half.yaml").write_text("extends: experiments/half.yaml\n")
    (two.folder / "link").symlink_to("experiments")
    too = "1: name: 'half' is experiments/half.yaml too: results are kept by name"
    assert two.run("ab", "stream", "half.yaml").error == f"half.yaml:{too}"
    two.ok("plan", "stream", "link/half.yaml")
    (two.folder / "experiments/deep").mkdir()
    two.spec("deep/half", "extends: ../half.yaml\n")
    assert two.run("run", "experiments/deep/half.yaml").error == f"experiments/deep/half.yaml:{too}"
    two.spec("half-x", "extends: half.yaml\n")
    (two.folder / "experiments/deep/half.yaml").unlink()
    two.spec("half", f"{(two.folder / 'experiments/half.yaml').read_text()}\nmatrix: {{env: {{X: [x, z]}}}}\n")
    assert two.run("run", "half").error.endswith("would call an experiment 'half-x', which is experiments/half-x.yaml")


def test_arms_that_measure_something_else_are_refused_unless_allowed(two: Project) -> None:
    two.spec("more", "extends: stream.yaml\nbench: [{llama-bench: {model: m, n_prompt: [16, 64], n_gen: 4}}]\n")
    refused = two.run("ab", "stream", "more")
    assert (refused.rc, "--allow matrix" in refused.error) == (9, True)
    allowed = two.run("plan", "stream", "more", "--allow", "matrix")
    assert (allowed.rc, "  2 cells: pp16, tg4\n" in allowed.out) == (0, True)
    assert tuple(Same) == MUST_AGREE


def test_an_arm_by_another_name_is_no_aa_session(two: Project) -> None:
    screen = ("ab", "--screen", "stream")
    two.spec("renamed", "extends: stream.yaml\n")
    # without known noise a screen ends before anything is measured
    assert "renamed against stream: their specs differ in nothing but the name" in two.run(*screen, "renamed").err
    assert "stream against stream: nothing differs, an A/A session\n" in two.run(*screen, "stream").err


def test_plan_shows_what_ab_would_do(two: Project) -> None:
    ran = two.ok("plan", "experiments/stream.yaml", "experiments/half.yaml")
    order = "A B A ... B A with 6 B, and at most 2 cycles more where a run failed or was disturbed"
    assert ran.out.split("[chain:0] ")[1].splitlines()[:7] == [
        "17 to 33 runs of at most 30 min 00 s each",
        "  baseline stream",
        "  {bin}/llama-bench -m {model:m} -p 16,32 -n 4 -r 6 -o jsonl",
        "  candidate half",
        "  TOY=half {bin}/llama-bench -m {model:m} -p 16,32 -n 4 -r 6 -o jsonl",
        "  3 cells: pp16, pp32, tg4",
        f"  order: burn-in of the baseline, then {order}",
    ]
    assert "; a step of more than 5 % costs its cycle, which no other replaces\n" in ran.out
    assert ran.out.splitlines()[-1].endswith("steps, 3 cells")
    assert "\n[build:half] the same as build:stream\n\n" in ran.out  # the arms differ in the environment
    assert ran.out.count("cmake --build") == 1


def test_a_session_that_goes_on_shows_how_far_it_is(two: Project) -> None:
    """Ctrl-C leaves it running; its report has no number of it, jobs says what it is, cancel makes it invalid."""
    two.spec("slow", SLOW)
    child = two.spawn("ab", "slow", "slow")
    job, _ = interrupt(child, "\nchain:0")
    assert child.returncode == 130
    shown = two.run("report", job).out
    assert "has not ended" in shown
    assert "- chain:0 llama-bench m: " in shown
    assert not VALUES.search(shown)
    assert two.run("logs", job).rc == 2
    (row,) = [row for row in two.json("jobs") if row["job"] == job]
    assert (row["on_host"], row["kind"], row["name"]) == ("running", "noise", "slow-vs-slow")
    two.ok("cancel", job)
    attached = two.run("attach", job)
    again = "dgxlab ab slow slow --host local"
    assert (attached.rc, attached.next) == (130, again)
    assert "**invalid (A/A): 2 of 2 invalid**" in attached.out
    assert two.ok("sessions").out.endswith("  cancelled; invalid (A/A): 2 of 2 invalid\n")


def test_whoever_attaches_is_told_whose_gate_it_is(two: Project) -> None:
    job, _ = interrupt(two.spawn("ab", "stream", "half"), "\nchain:0")
    lines = two.ok("attach", job).err.splitlines()
    gates = [line.split(":")[0] for line in lines if line.startswith("gate ")]
    assert gates == [f"gate MUL_MAT on CPU of {arm}, after the chains" for arm in ("stream", "half")]


def test_a_line_of_a_chain_says_what_is_wrong_with_it() -> None:
    """A failed run, a cooling device, an end without a run; and no run of a chain is told twice."""
    shown = Lines()
    failed = "cycle 2 does not count: baseline 2 failed: killed by SIGKILL"
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
        note=failed,
    )
    run = read(Journal(plan("J")).run(chain="chain:1", role="baseline", cycle=2, seconds=12.34).events[0])
    assert shown.of(run) == []
    where = "chain:1 llama-bench cycle 2 of 8, baseline (SM 1965 to 1980 MHz)"
    assert shown.of(event) == [f"{where}: baselines 1.23 % apart, 1 of 2 count, 1 min 30 s left; {failed}"]
    burn_in = replace(event, state="burn-in", role="burn-in", drift=None, note="")
    assert shown.of(run) == []
    assert shown.of(burn_in) == ["chain:1 llama-bench burn-in 2 (12.3 s, SM 1965 to 1980 MHz): 1 min 30 s left"]
    warm = {"temperature.gpu": (70.0, 70.0)}
    cooling = replace(event, state="cooling", conditions=warm, note="cooling from 70.0 °C to 50.0 °C")
    assert shown.of(cooling) == ["chain:1 cooling from 70.0 °C to 50.0 °C, 70 °C"]
    hot = replace(event, state="done", conditions={}, note="the device did not cool")
    assert shown.of(hot) == ["chain:1 the device did not cool"]


@pytest.mark.parametrize(
    ("journal", "recorded"),
    [
        (Journal(plan("J")).job().build().gate().gate(id="gate:0:after"), [True, False]),
        (Journal(plan("J")).job().build(source=replace(source(), dirty=True)).gate(), [False]),
        (Journal(session_plan("J", chain_step())).built().gates().gate(id="gate:0:after"), [True, True, False]),
    ],
)
def test_whose_count_is_recorded_is_said_once(journal: Journal, recorded: list[bool]) -> None:
    """That of a checkout never is; the arms of a session each have a tree here."""
    shown = Lines()
    for _ in range(2):  # a search shows several jobs
        lines = [line for event in journal.events for line in shown.of(read(event)) if line.startswith("gate ")]
        assert [line.endswith("; recorded as what to expect from now on") for line in lines] == recorded


def test_a_model_of_both_arms_is_told_once() -> None:
    shown = Lines()
    for _ in range(2):  # a search shows several jobs
        events = Journal(plan("J")).job().model().model().model(path="/other.gguf").events
        lines = [line for event in events for line in shown.of(read(event))]
        paths = ["/home/me/.dgxlab/models/tiny.gguf", "/other.gguf"]
        assert lines == [f"model tiny: {path}, 1.00 MiB" for path in paths]


@pytest.mark.parametrize(
    ("state", "path", "owner", "lines"),
    [
        ("waiting", "/l", "job J of alice", [f"waiting for the device: /l is held by job J of alice; {UNTIL}"]),
        ("waiting", "/l", EARLIER, [f"waiting for the device: /l is kept for {EARLIER}; {UNTIL}"]),
        ("building", "/w", "job J of bob", [f"waiting for the build of job J of bob, in the same folder /w; {UNTIL}"]),
        ("unwatched", "/o", "no folder", ["the lock file /o is neither read nor signed: no folder"]),
        ("held", "/l", "", []),
    ],
)
def test_waiting_is_said(state: str, path: str, owner: str, lines: list[str]) -> None:
    """An older agent did not tell for how long it would wait."""
    event = LockEvent(state=state, path=path, owner=owner, left_s=3600.0)
    assert Lines().of(event) == lines
    assert Lines().of(replace(event, left_s=0.0)) == [line.removesuffix(f"; {UNTIL}") for line in lines]


def test_the_bar_of_a_job_that_waits_says_so() -> None:
    bar = Bar()
    assert [task.description for task in bar.progress.tasks] == ["waiting"]  # of `plan` too, which has no job
    for state, words in (("waiting", "waiting for the device"), ("building", "waiting for another build")):
        bar.show(StepEvent(id="run:0", kind="run", state="started"))
        bar.show(LockEvent(state=state, path="/l", owner="job J of alice"))
        assert [task.description for task in bar.progress.tasks] == [words]
