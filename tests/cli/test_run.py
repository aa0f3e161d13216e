"""`dgxlab run`, `gate`, `plan`, `report`: a result on stdout, everything else on stderr."""

import json
import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from dgxlab.cli._display import Waits
from dgxlab.model import Plan, from_json
from dgxlab.model.events import ProgressEvent
from tests import machines, toy
from tests.cli.conftest import Project

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
TOY = "experiments/toy.yaml"
BUSY = "{llama-bench: {model: m, n_prompt: 16, env: {TOY: busy}}}"
GATE = "| MUL_MAT | CPU | 4/4 | 1 | 4 | passed |"


def test_run_prints_the_report_and_says_what_goes_on(project: Project) -> None:
    out, err = (child := project.spawn("run", TOY)).communicate(timeout=120)
    assert child.returncode == 0
    assert out.startswith("# Experiment toy\n\n> toys can be measured\n")
    rows = {GATE, "| 8 | 108.5 | 1.008 |", "| pp16 | 1600 ± 0.2 (5) |", "| 4 | 128.0 | 64.00 | 106.7 |"}
    assert rows <= set(out.splitlines())
    assert re.search(r"^step \d of \d: gate MUL_MAT on CPU of toy\b", err, re.MULTILINE)
    others = ("waiting for the device", "step ", "  flag: ")
    notes = [line for line in err.splitlines() if not line.startswith(others)][-16:]
    job = re.fullmatch(r"job (\d{8}-\d{6}-toy-[0-9a-f]{6}) runs on local", notes[0])
    assert job and job[1] in out  # noqa: PT018 - one thing
    assert re.match(r"build [0-9a-f]{16} of toy: (built in|reused)", notes[1])
    assert notes[2] == f"model m: {project.machine.model}, 64 B"
    assert notes[3].startswith("gate MUL_MAT on CPU: passed, 4/4, 1 unsupported (")
    assert notes[12].startswith("  pp16 tg4 B1: S_PP 32.0 t/s")
    assert notes[-1] == f"8 cells, 8 measured now, 0 up to date; recorded in {project.folder}/results.db"
    assert not CONTROL.search(out + err)


def test_run_again_measures_nothing(measured: Project) -> None:
    first = measured.run("report", "toy")
    again = measured.run("run", TOY)
    assert (again.rc, again.out) == (0, first.out)
    counted = "8 cells, 0 measured now, 8 up to date"
    assert again.err == f"{measured.where}{counted}; recorded in {measured.folder}/results.db\n"
    assert "8 cells, 8 measured now, 0 up to date" in measured.run("run", TOY, "--again").err


def test_what_has_a_hard_event_is_said_at_the_end(project: Project) -> None:
    project.spec("busy", f"extends: toy.yaml\nbench: [{BUSY}]\n")
    with machines.busy_processor():
        lines = [project.ok("run", "busy").err.splitlines()[-1] for _ in range(2)]
    ends = [
        re.fullmatch(r"(.*), 1 with a hard event \(dgxlab (report \S+); --again measures all again\).*", line)
        for line in lines
    ]
    assert [end and end[1] for end in ends] == [
        f"1 cell, {counts} up to date" for counts in ("1 measured now, 0", "0 measured now, 1")
    ]
    assert "- **hard event** in every row: " in project.ok(*ends[1][2].split()).out


def test_what_is_disturbed_on_several_hosts_is_said_at_the_end(project: Project) -> None:
    project.spec("busy", f"extends: toy.yaml\nbench: [{BUSY}]\n")
    entries = (f"{name}: {{local: true, root: {project.folder}/{name}, env: {{TOY_NODE: {name}}}}}\n" for name in "ab")
    project.hosts.write_text("".join(entries))
    with machines.busy_processor():
        ran = project.ok("run", "busy", "--host", "a,b")
    jobs = dict(re.findall(r"(?m)^([ab]): job (\S+) runs on ", ran.err))
    disturbed = [f"1 disturbed now on {name} (dgxlab report {jobs[name]} has these)" for name in "ab"]
    summary = f"2 hosts, 2 of 2 devices measured, {', '.join(disturbed)}; --again measures all again; recorded in "
    assert ran.err.splitlines()[-1].startswith(summary)


def test_every_host_is_known_before_anything_is_measured(project: Project) -> None:
    ran = project.run("run", TOY, "--host", "local,dgxx")
    assert (ran.rc, ran.out) == (9, "")
    assert ran.error.startswith("host dgxx is not known")
    assert "runs on" not in ran.err
    assert not (project.folder / "results.db").exists()


def test_a_host_that_cannot_be_used_is_counted_as_not_measured(project: Project) -> None:
    project.hosts.write_text("gone: {local: true, root: /dev/null/dgxlab}\n")
    ran = project.run("run", TOY, "--host", "local,gone")
    assert ran.rc == 3
    assert "2 hosts, 1 of 2 devices measured; recorded in " in ran.err


@pytest.mark.alone  # the earlier run counts only where other programs leave it a processor
def test_numbers_that_are_older_than_the_run_are_said_to_be(project: Project) -> None:
    """Where all of it was disturbed, and an earlier session was not."""
    project.spec("busy", f"extends: toy.yaml\nbench: [{BUSY}]\n")
    with machines.one_processor():
        earlier = (project.ok("run", "busy", "--again") for _ in range(10))  # others may use it
        before = next(ran for ran in earlier if "hard event" not in ran.err)
    with machines.busy_processor():
        again = project.ok("run", "busy", "--again")
    jobs = [re.findall(r"(?m)^job (\S+) runs on local$", ran.err)[0] for ran in (before, again)]
    assert (f"session {jobs[0]}" in again.out, "hard event" in again.out) == (True, False)
    disturbed = "1 disturbed now: the report has numbers of earlier sessions instead"
    mend = f"(dgxlab report {jobs[1]} has these; --again measures all again)"
    assert f"1 cell, 1 measured now, 0 up to date, {disturbed} {mend}; recorded in" in again.err
    assert "- **hard event** in every row: " in project.ok("report", jobs[1]).out


@pytest.mark.parametrize("folder", ["experiments/deep", ".."])
def test_a_project_has_one_record(measured: Project, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    (measured.folder / "patches").rmdir()
    elsewhere = measured.folder / folder
    elsewhere.mkdir(exist_ok=True)
    monkeypatch.chdir(elsewhere)
    ran = measured.run("run", measured.folder / TOY)
    assert (ran.rc, ran.err.startswith(measured.where), " 0 measured now, 8 up to date" in ran.err) == (0, True, True)
    assert list(measured.folder.parent.rglob("results.db")) == [measured.folder / "results.db"]


def test_a_guessed_project_is_said_to_be_one(measured: Project) -> None:
    marker = measured.folder / ".dgxlab-root"
    marker.unlink()
    guessed = f"project {measured.folder} (guessed; mark it with: touch {marker}), record "
    assert measured.run("report", "toy").err.startswith(guessed)


def test_json_is_json_and_quiet_is_quiet(measured: Project) -> None:
    for args in (("run", TOY), ("report", "toy")):
        ran = measured.run(*args, "--format", "json", "-q")
        report = json.loads(ran.out)
        assert (ran.rc, ran.err) == (0, "")
        forms = [table["form"] for table in report["tables"]]
        assert (report["title"], forms) == ("Experiment toy", ["gates", "ops", "single-stream", "concurrency"])
        (row,) = [row for row in report["tables"][2]["rows"] if row["test"] == "pp16"]
        assert row["avg_ts"]["n"] == 5


def test_database_is_the_projects_or_the_one_named(measured: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    there = measured.run("report").out
    monkeypatch.chdir(measured.folder / "experiments")
    assert measured.run("report").out == there
    monkeypatch.setenv("DGXLAB_DB", "other.db")
    measured.ok("run", "toy.yaml", "-q")
    assert Path("other.db").exists()


def test_gate_runs_and_reports_the_gates_alone(project: Project) -> None:
    for _ in range(2):
        ran = project.run("gate", TOY)
        assert (ran.rc, ran.out.count("\n## "), GATE in ran.out) == (0, 1, True)
        assert "gate MUL_MAT on CPU: passed, 4/4, 1 unsupported" in ran.err
        assert ran.err.endswith(f"\n1 gate, 1 passed; recorded in {project.folder}/results.db\n")


def test_plan_prints_what_would_run_and_touches_nothing(project: Project) -> None:
    ran = project.run("plan", TOY)
    commands = [line.strip() for line in ran.out.splitlines() if line.startswith("  {bin}/") and "--help" not in line]
    assert commands == [
        "{bin}/test-backend-ops test -o MUL_MAT -b CPU",
        "{bin}/test-backend-ops perf -o MUL_MAT -b CPU -p '^(?=(.*,)?type_a=(q4_0)(,|$))(?=(.*,)?m=(4096)(,|$))"
        "(?=(.*,)?k=(14336)(,|$))(?=(.*,)?n=(8|512)(,|$))' --output sql",
        "{bin}/llama-bench -m {model:m} -p 16,32 -n 4 -r 6 -o jsonl",
        "{bin}/llama-batched-bench -m {model:m} -c 1024 -npp 16 -ntg 4 -npl 1,2,4,1,2,4,4 --output-format jsonl",
    ]
    assert ran.out.splitlines()[-1] == "9 steps, 8 cells"
    assert sorted(path.name for path in project.folder.iterdir()) == [".dgxlab-root", "experiments", "patches"]
    elsewhere = project.ok("plan", TOY, "--host", "elsewhere")
    assert elsewhere.out == ran.out
    assert "note: host elsewhere is not known: no hosts.yaml names it" in elsewhere.err
    assert elsewhere.err.endswith("; next: dgxlab host add elsewhere\n")
    two = project.run("plan", TOY, TOY, "--effect", "2%")
    assert (two.rc, two.next) == (2, f"dgxlab plan {TOY} --effect 2%")
    words = ("--set", "bench.1.llama-bench.n_gen=8", "--set", "bench.1.llama-bench.n_prompt=64")
    assert "{bin}/llama-bench -m {model:m} -p 64 -n 8 -r 6 -o jsonl" in project.run("plan", TOY, *words).out
    plan = from_json(Plan, project.json("plan", TOY))
    assert [step.id for step in plan.steps][-1] == "run:2"


def test_plan_says_that_this_machine_lacks_a_file_of_a_model(project: Project) -> None:
    project.spec("nope", "extends: toy.yaml\nmodels: {nope: {path: ~/nope.gguf}}\n")
    note = "note: model nope is not on host local: there is no file ~/nope.gguf, which the spec names; next: "
    assert note in project.ok("plan", "nope").err
    assert note not in project.ok("plan", "nope", "--host", "elsewhere").err


def test_plan_says_what_must_be_on_stderr(project: Project) -> None:
    """Of a gate, of the runs of an arm, and for a baseline what must not be there."""
    marked = 'engaged: "toy-path: on"'
    gates = f"  - engaged: {{stderr: 'toy-path: on'}}\n  - backend-ops: {{op: MUL_MAT, backend: CPU, {marked}}}\n"
    project.spec("marked", f"extends: toy.yaml\nenv: {{TOY_PATH: '1'}}\ngates:\n{gates}")
    alone = project.ok("plan", "marked").out
    assert "  must pass 4/4\n  must hold: 'toy-path: on' on stderr\n" in alone
    assert alone.count("must hold: 'toy-path: on' on stderr\n") == 4
    both = project.ok("plan", "toy", "marked").out
    for role, words in (("baseline toy", "not on stderr"), ("candidate marked", "on stderr")):
        assert len(re.findall(rf"  {role}\n  .*\n  must hold: 'toy-path: on' {words}\n", both)) == 3


def test_plan_knows_what_the_record_has(measured: Project) -> None:
    """How long each step took is beside it; --host adds what is done there already."""
    plain = measured.ok("plan", TOY).out
    assert re.search(r"(?m)^\[gate:0\] at most [^;]+; [\d.]+ m?s the last time$", plain)
    assert re.search(r"(?m)^\[run:0\] at most [^;]+; [\d.]+ m?s by the median of the last runs$", plain)
    # another test may have built it before
    done = r"9 steps, 8 cells; about [\d.]+ m?s if nothing is reused(, besides build:toy, of which no time is known)?$"
    assert re.search(done, plain.rstrip())
    beside = measured.ok("plan", TOY, "--host", "local").out
    assert beside.splitlines()[-1] == "on local: built, 1 of 1 gate passed, 8 of 8 cells measured"
    some = measured.ok("plan", TOY, "--host", "local", "--set", "bench.1.llama-bench.n_gen=8").out
    assert some.splitlines()[-1] == "on local: built, 1 of 1 gate passed, 7 of 8 cells measured"


def test_dirty_tree_is_built_and_said(project: Project, tmp_path: Path) -> None:
    checkout = project.checkout(tmp_path / "llama.cpp")
    source = checkout / "ggml" / "ggml.c"
    source.write_text(source.read_text() + "int more(void) { return 1; }\n")
    before = toy.git(checkout, "status", "--porcelain")
    ran = project.run("run", TOY, "--tree", checkout)
    assert (ran.rc, toy.git(checkout, "status", "--porcelain")) == (0, before)
    assert ran.out.count("**working tree** as it was on the disk") == 4
    assert "8 cells, 8 measured now, 0 up to date" in ran.err


def test_what_was_not_measured_is_not_called_measured(project: Project) -> None:
    crash = "{llama-bench: {model: m, n_prompt: [16, 32], env: {TOY: crash}}}"
    batched = "{batched-bench: {model: m, npp: 16, ntg: 4, npl: [1, 2]}}"
    ran = project.run("run", project.spec("some", f"extends: toy.yaml\nbench: [{crash}, {batched}]\n"))
    assert ran.rc == 4
    assert "- llama-bench m: pp16, pp32 (failed in" in ran.out
    assert "| 2 | 64.0 | 32.00 | 53.3 |" in ran.out
    assert "4 cells, 2 measured now, 0 up to date, 2 not measured; recorded in" in ran.err
    assert "SIGSEGV" in ran.error
    assert ran.next.startswith("dgxlab logs ")
    project.ok(*ran.next.split()[1:])


def test_a_gate_that_only_expects_another_count_leads_to_its_spec(project: Project) -> None:
    """Where a case has failed, or --set has the count, it leads to the output as ever."""
    gate = "gates: [backend-ops: {op: MUL_MAT, backend: CPU, expect: 5/5}]"
    path = project.spec("count", f"extends: toy.yaml\n{gate}\n")
    ran = project.run("gate", path)
    assert (ran.rc, ran.next) == (5, f"${{EDITOR:-vi}} {project.folder / path}")
    for setting in ("env.TOY=wrong", "gates.0.backend-ops.expect=3/3"):
        assert project.run("gate", path, "--set", setting).next.startswith("dgxlab logs ")


@pytest.mark.parametrize(
    ("args", "rc"),
    [
        ("report", 0),
        (f"run {TOY} --set gates.0.backend-ops.expect=5/5", 5),
        ("schema", 0),
        ("logs SESSION run-0.out", 0),
    ],
)
def test_reader_that_leaves_early_is_no_error(measured: Project, args: str, rc: int) -> None:
    (job,) = measured.json("report")["tables"][0]["rows"]
    child = measured.spawn(*args.replace("SESSION", job["session"]).split())
    assert child.stdout
    assert child.stderr
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert (child.wait(timeout=60), "Traceback" in err, "Broken pipe" in err) == (rc, False, False)


def test_module_and_script_are_the_same_program(project: Project) -> None:
    out, _ = project.spawn("--version").communicate(timeout=30)
    script = Path(sysconfig.get_path("scripts")) / "dgxlab"
    assert out == subprocess.run([script, "--version"], capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"dgxlab \d+\.\d+\.\d+\n", out)


def test_a_log_says_every_minute_how_far_a_build_is() -> None:
    """As it begins, once it makes progress; then a line a minute, and none of a build that is reused."""
    waits = Waits()

    def said(t: float, done: int, note: str, step: str = "build:stock") -> str:
        return waits.of(ProgressEvent(t=t, id=step, done=done, total=480 * bool(done), note=note))

    assert said(0, 0, "step 1 of 9: build stock") == ""
    assert said(1000, 0, "step 1 of 9: cmake") == "step 1 of 9: build stock"
    assert [said(t, 40, "step 1 of 9: [40/480] a.o") for t in (1001, 1059)] == ["", ""]
    assert said(1060, 80, "step 1 of 9, 5 min left: Building b.o") == "step 1 of 9, 5 min left: build stock, 80 of 480"
    assert said(1061, 90, "step 1 of 9, 5 min left: Building c.o") == ""
    begun = [said(t, 0, "step 2 of 9: build other", "build:other") for t in (1070, 1140)]
    assert begun == ["", "step 2 of 9: build other"]
    assert waits.of(ProgressEvent(t=2000, id="run:0", done=1, total=2, note="step 5 of 9: llama-bench")) == ""
