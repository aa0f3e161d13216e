"""Bad input: one sentence, the right exit code, the next command; never a traceback, never a half result on stdout."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import toy
from tests.cli.conftest import Project, Ran

TOY = "experiments/toy.yaml"
NOWHERE = "2" * 39 + "a"


def refused(ran: Ran, rc: int, *words: str) -> None:
    assert ran.rc == rc, ran.err
    assert "Traceback" not in ran.err
    assert [word for word in words if word not in ran.error] == []
    assert ran.next


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("bnech: []", "bad.yaml:2: bnech: unknown key; did you mean bench?"),
        (f"llama_cpp: {{pin: {NOWHERE}, sources: [/nosuch]}}", f"pin {NOWHERE} cannot be taken from"),
        ("models: {m: {path: /no/such.gguf}}", "model m is not on host local: there is no file /no/such.gguf"),
        ("host: dgx", "host dgx is not known"),
        ("series: [nope]", "has no series 'nope'"),
        ("gates: [backend-ops: {op: MUL_MATT, backend: CPU}]", "has no operation MUL_MATT; did you mean MUL_MAT?"),
    ],
)
def test_wrong_specs_are_refused(project: Project, spec: str, words: str) -> None:
    path = project.spec("bad", f"extends: toy.yaml\n{spec}\n")
    jobs = project.machine.home / ".dgxlab" / "jobs"
    before = sorted(jobs.glob("*"))
    ran = project.run("run", path)
    refused(ran, 9, words)
    assert (ran.out, sorted(jobs.glob("*"))) == ("", before)


@pytest.mark.parametrize(
    ("command", "error", "mend"),
    [
        ("bytes", "missing argument 'kernel'", "dgxlab bytes --help"),
        ("watch stock", "missing option '--tree'", "dgxlab watch --help"),
        ("host lst", "no such command 'lst'. Did you mean 'list'?", "dgxlab host --help"),
        ("report stock --form", "option '--form' requires an argument", "dgxlab report stock --help"),
        (
            "report --form verdict",
            "invalid value for '--form': 'verdict' is not one of its values; did you mean verdicts?",
            "dgxlab report --help",
        ),
        ("run stock --wait x", "invalid value for '--wait': must be a whole number, not 'x'", "dgxlab run --help"),
        ("run stock --nodes 0", "invalid value for '--nodes': must be at least 1, not '0'", "dgxlab run --help"),
        ("bytes w4a16 --gain x", "invalid value for '--gain': must be a number, not 'x'", "dgxlab bytes --help"),
        ("--format xml", "invalid value for '--format': 'xml' is not one of 'human', 'json'", "dgxlab --help"),
    ],
)
def test_words_that_no_command_takes(dgxlab: Callable[..., Ran], command: str, error: str, mend: str) -> None:
    ran = dgxlab(*command.split())
    assert (ran.rc, ran.out, ran.err) == (2, "", f"error: {error}\nnext: {mend}\n")
    assert dgxlab(*mend.split()[1:]).rc == 0


def test_names_that_the_source_does_not_have_are_told_before_a_build(project: Project, tmp_path: Path) -> None:
    """A type and a misspelt boolean are refused; cmake ignores an option.

    Where the files that name them are not found, nothing is said.
    """
    derived = "{path: /m.gguf}, d: {derived: {of: m, quant: Q4_KM}}"
    path = project.spec("names", f"extends: toy.yaml\ncmake: {{GGML_NATVE: true}}\nmodels: {{m: {derived}}}\n")
    assert "has no" not in project.ok("plan", path).err
    checkout = project.checkout(tmp_path / "llama.cpp")
    with (checkout / "CMakeLists.txt").open("a") as cmake:
        cmake.write("option(GGML_NATIVE)\noption(ZENDNN_ROOT)\n")
    assert (
        "has no cmake option GGML_NATVE; did you mean GGML_NATIVE?\n"
        in project.ok("plan", path, "--tree", checkout).err
    )
    for value, rc in (("flase", 9), ("off", 0), ("0", 0), ("true", 0)):
        ran = project.run("plan", path, "--tree", checkout, "--set", f"cmake.GGML_NATIVE='{value}'")
        assert (ran.rc, "cmake.GGML_NATIVE must be true or false, not 'flase'" in ran.err) == (rc, bool(rc)), ran.err
    project.ok("plan", path, "--tree", checkout, "--set", "cmake.ZENDNN_ROOT=/opt")  # llama.cpp's option, but a path
    (checkout / "tools" / "quantize.cpp").write_text('{ "Q4_K_M", 1 }')
    toy.git(checkout, "add", ".")
    ran = project.run("plan", path, "--tree", checkout)
    refused(ran, 9, "has no type Q4_KM; did you mean Q4_K_M?")
    assert ran.next.endswith("experiments/names.yaml")


@pytest.mark.parametrize(
    ("command", "rc", "words"),
    [
        ("run experiments/toyy.yaml", 9, "no such file; did you mean toy.yaml?"),
        ("run experiments", 9, "is not a regular file"),
        ("run hosts.yaml", 9, "hosts.yaml is about hosts, and no experiment"),
        (f"run {TOY} --host dgx", 9, "host dgx is not known"),
        (f"run {TOY} --set nonsense", 9, "is not key=value"),
        (f"run {TOY} --set gates=[]", 9, "no gate can be removed"),
        (f"run {TOY} --tree /nosuch", 9, "is not a git checkout"),
        (f"run {TOY} --db /no/such/results.db", 9, "cannot be written"),
        ("plan nosuch.yaml", 9, "no such file"),
        ("report", 9, "there is no database"),
        ("jobs --db none.db", 9, "there is no database"),
        ("attach", 2, "this project has no record yet"),
        (f"db check {TOY}", 9, "is not an SQLite database"),
        (f"db rebuild {TOY}", 9, "is not an SQLite database: it is text"),
        ("db merge a.db b.db", 9, "there is no database"),
        ("patch check nope", 9, "has no series 'nope'"),
        ("patch check --pin main", 9, "a pin is a full commit id"),
        ("patch refresh nope", 9, "has no series 'nope'"),
        ("patch export new --tree /nosuch", 9, "/nosuch"),
        ("schema --output /no/such/schema.json", 2, "cannot be written"),
    ],
)
def test_wrong_commands_are_refused(project: Project, command: str, rc: int, words: str) -> None:
    ran = project.run(*command.split())
    refused(ran, rc, words)
    assert ran.out == ""


@pytest.mark.parametrize("words", ["db check", "db text", "db merge results.db", "sessions --db", "export x.csv --db"])
def test_a_run_makes_the_projects_own_database_alone(measured: Project, words: str) -> None:
    ran = measured.run(*words.split(), "/nosuch.db")
    assert (ran.rc, ran.error, ran.next) == (9, "there is no database /nosuch.db", "ls -l /")


USAGE = ("nosuch", "run", f"run {TOY} --nosuch", "report --format xml", f"run {TOY} --wait -1", "patch export x")


@pytest.mark.parametrize("command", USAGE)
def test_usage_errors_exit_with_2(project: Project, command: str) -> None:
    ran = project.run(*command.split())
    assert (ran.rc, ran.out, ran.next.endswith(" --help")) == (2, "", True)


def test_an_unknown_package_needs_the_users_word(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """One letter off is another package: each command names the option, and with it the package is looked for."""
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    package = "pypi:llama-cpp-pyhton==0.3.30"
    path = project.spec("odd", f"extends: toy.yaml\nllama_cpp: {{pin: {NOWHERE}, sources: ['{package}']}}\n")
    patch = ("patch", "check", "--pin", NOWHERE, "--source", package)
    for args in (("plan", path), ("run", path), ("ab", path, TOY), patch):
        ran = project.run(*args)
        refused(ran, 9, f"{package}: dgxlab does not know this package's digest")
        assert ran.next == f"dgxlab {' '.join(map(str, args))} --trust-source"
    refused(project.run("plan", path, "--trust-source"), 9, "pip finds no version of it at all")


@pytest.mark.parametrize("command", ["attach nope", "cancel %toy%", "attach _", "cancel *", "logs %"])
def test_unknown_jobs_are_refused(measured: Project, command: str) -> None:
    """No pattern, nothing ambiguous: cancel must never hit another job than the one that was meant."""
    ran = measured.run(*command.split())
    refused(ran, 2, "no job begins with")
    assert ran.next == "dgxlab jobs"


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ("{op: MUL_MAT, backend: CPU, expect: 4/4, env: {TOY: wrong}}", "failed, 3/4, 1 unsupported"),
        ("{op: MUL_MAT, backend: GPU7}", "failed, nothing counted"),
    ],
)
def test_failed_gates_exit_with_5(project: Project, gate: str, words: str) -> None:
    """Nothing is measured behind a gate that failed."""
    ran = project.run("run", project.spec("gated", f"extends: toy.yaml\ngates: [{{backend-ops: {gate}}}]\n"))
    refused(ran, 5, "MUL_MAT")
    assert words in ran.err
    assert "| failed |" in ran.out
    assert "## Single stream" not in ran.out
    assert "None" not in ran.out + ran.err


def test_patch_that_does_not_apply_exits_with_6(project: Project, tmp_path: Path) -> None:
    checkout = project.checkout(tmp_path / "llama.cpp")
    source = checkout / "ggml" / "ggml.c"
    source.write_text(source.read_text().replace("out of toys", "calm"))
    project.ok("patch", "export", "calm", "--tree", checkout, "-m", "toys : be calm")
    spec = project.spec("calm", "extends: toy.yaml\nseries: [calm]\n")
    moved = project.run("run", spec, "--set", f"llama_cpp.pin={project.machine.later}")
    refused(moved, 6, "series calm: toys-be-calm.patch does not apply", "ggml/ggml.c moved")
    assert moved.next == f"dgxlab patch refresh calm --pin {project.machine.later}"
    patch = project.folder / "patches" / "calm" / "toys-be-calm.patch"
    patch.write_text(patch.read_text().replace("out of toys", "out of tofu"))
    broken = project.run("run", spec)
    refused(broken, 6, "series calm: toys-be-calm.patch does not apply", "ggml/ggml.c:")
    assert broken.out == ""


def test_compiler_error_exits_with_7(project: Project, tmp_path: Path) -> None:
    checkout = project.checkout(tmp_path / "llama.cpp")
    (checkout / "tools" / "llama-bench.c").write_text("int main(void) { return undeclared_thing; }\n")
    ran = project.run("run", TOY, "--tree", checkout)
    refused(ran, 7, "compiling failed")
    assert "tools/llama-bench.c:1:25: error: " in ran.err
    assert "undeclared_thing" in project.run(*ran.next.split()[1:]).out
    assert "8 not measured" in ran.err


def test_busy_host_exits_with_10(project: Project, tmp_path: Path) -> None:
    (tmp_path / "owner").write_text("carol tunes vllm\n")
    project.hosts.write_text(f"box: {{local: true, lock: {tmp_path / 'owner'}}}\n")
    ran = project.run("run", TOY, "--host", "box", "--wait", "0")
    assert (ran.rc, ran.next) == (10, f"dgxlab run {TOY} --host box --wait 60"), ran.err
    assert " is held by " in ran.error
    assert (tmp_path / "owner").read_text() == "carol tunes vllm\n"


def test_damaged_database_is_said(measured: Project) -> None:
    database = measured.folder / "results.db"
    os.truncate(database, database.stat().st_size // 2)
    for args in (("db", "check"), ("report",), ("run", TOY)):
        ran = measured.run(*args)
        assert ran.rc in (9, 11)
        refused(ran, ran.rc)


def test_series_is_named_where_experiments_disagree(project: Project) -> None:
    """Two pins among the specs: each is checked, and what writes asks which; a broken spec is left out, and said."""
    project.spec("later", f'extends: toy.yaml\nllama_cpp: {{pin: "{project.machine.later}"}}\n')
    refused(project.run("patch", "refresh", "x"), 9, "name 2 pins")
    for own in (project.machine.pin, project.machine.later):
        checkout = project.checkout(project.folder / own)
        toy.git(checkout, "checkout", "-q", own)
        ran = project.run("patch", "export", "x", "--tree", checkout)
        refused(ran, 9, f"nothing to export: {checkout} is pin {own[:12]}")  # the checkout says which
    pins = sorted((project.machine.pin, project.machine.later))
    assert project.ok("patch", "check").out == "".join(f"pin {pin[:12]}\nno series\n" for pin in pins)
    ran = project.run("patch", "check", "--pin", project.machine.later)
    assert (ran.rc, ran.out) == (0, f"pin {project.machine.later[:12]}\nno series\n")
    project.spec("later", "extends: toy.yaml\nbnech: []\n")
    ran = project.run("patch", "check")
    assert (ran.rc, ran.out) == (0, f"pin {project.machine.pin[:12]}\nno series\n")
    assert ran.err.startswith("left out: experiments/later.yaml:2: bnech: unknown key")
