"""`dgxlab init` and `new`: from an empty folder to a project, an experiment and a series."""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.spec import load
from dgxlab.store import Store
from tests import machines, toy
from tests.cli.conftest import Project, Ran
from tests.cli.test_help import LEAVES
from tests.journals import PIN

Run = Callable[..., Ran]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    folder = tmp_path / "lab"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("flag", "host", "candidate", "arch"),
    [
        ("--cpu", "local", "one-thread", None),
        ("--cuda", "local", "no-graphs", "90"),
        ("--spark", "dgx", "no-graphs", "121"),
    ],
)
def test_experiments_of_a_new_project_are_sound(
    empty: Path, dgxlab: Run, flag: str, host: str, candidate: str, arch: str | None
) -> None:
    """The pin and the gate's counts are those of the shipped experiments; the plan names the pair."""
    ran = dgxlab("init", flag)
    assert ran.rc == 0, ran.err
    stock, other = (load(empty / "experiments" / f"{name}.yaml") for name in ("stock", candidate))
    assert (stock.pin, stock.host, stock.root, other.name) == (PIN, host, str(empty), candidate)
    assert stock.cmake.get("CMAKE_CUDA_ARCHITECTURES") == arch
    assert f"experiment={candidate} baseline=stock" in (empty / "plans" / "first.md").read_text()
    assert f"dgxlab ab stock {candidate}" in ran.out
    names = {line.split()[0] for line in dgxlab("host", "list").out.splitlines()[1:]}
    assert names == {"local", host}


def test_cuda_is_for_the_gpu_that_is_here(
    empty: Path, dgxlab: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines.h200(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    assert dgxlab("init", "--cuda").err == ""
    assert load(empty / "experiments" / "stock.yaml").cmake["CMAKE_CUDA_ARCHITECTURES"] == "90"


def test_a_new_project_tells_programs_what_to_do(empty: Path, dgxlab: Run) -> None:
    """In the words of its own commands, each of which is there."""
    assert "AGENTS.md" in dgxlab("init").out
    text = (empty / "AGENTS.md").read_text()
    named = set(re.findall(r"dgxlab ((?:db |session )?[a-z]+)", text))
    assert {"try", "report", "mcp", "db check"} <= named <= {" ".join(path) for path in LEAVES}


def test_instructions_for_programs_that_are_there_stay(empty: Path, dgxlab: Run) -> None:
    (empty / "AGENTS.md").write_text("mine")
    assert "AGENTS.md" not in dgxlab("init").out
    assert (empty / "AGENTS.md").read_text() == "mine"


def test_a_new_project_is_under_git_and_merges_its_record(empty: Path, dgxlab: Run) -> None:
    (empty / ".gitignore").write_text("mine\n*.db-wal")
    files = dgxlab("init").out
    assert ".gitattributes" in files
    assert (empty / ".gitignore").read_text().splitlines() == ["mine", "*.db-wal", "*.db-shm", "*.db.backups/"]
    assert toy.git(empty, "config", "merge.dgxlab-db.driver").endswith("-m dgxlab db merge %A %B")
    assert toy.git(empty, "check-attr", "merge", "results.db").endswith(": dgxlab-db")


def test_a_folder_of_a_repository_gets_no_repository_of_its_own(
    empty: Path, dgxlab: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy.git(empty, "init", "-q")
    (empty / "lab").mkdir()
    monkeypatch.chdir(empty / "lab")
    assert dgxlab("init").rc == 0
    assert not (empty / "lab" / ".git").exists()
    assert toy.git(empty, "config", "merge.dgxlab-db.driver") != ""


def test_nothing_is_written_over(empty: Path, dgxlab: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    (empty / "hosts.yaml").write_text("mine: {ssh: mine}\n")
    ran = dgxlab("init")
    assert (ran.rc, ran.error) == (2, f"{empty}/hosts.yaml is there already, and nothing is written over")
    assert list(empty.iterdir()) == [empty / "hosts.yaml"]
    (empty / "hosts.yaml").unlink()
    assert dgxlab("init", "--cpu", "--spark").rc == 2
    assert dgxlab("init").rc == 0
    for folder in (empty, empty / "experiments"):
        monkeypatch.chdir(folder)
        ran = dgxlab("init")
        assert (ran.rc, ran.error) == (2, f"{empty} is a project already")
        assert ran.next == f"dgxlab plan {empty}/experiments/one-thread.yaml"


@pytest.mark.parametrize(
    "words",
    [
        *("report", "report x", "logs x", "export x.csv", "session reject x --because y"),
        *("db check", "run stock", "run experiments/stock.yaml", "ab a b", "noise stock", "gate stock", "plan stock"),
        *("patch check", "new experiment x --extends stock", "new series x"),
    ],
)
def test_an_empty_folder_leads_to_init(empty: Path, dgxlab: Run, words: str) -> None:
    ran = dgxlab(*shlex.split(words))
    assert (ran.rc != 0, ran.next) == (True, "dgxlab init")
    assert list(empty.iterdir()) == []


def test_jobs_are_asked_for_without_a_record(empty: Path, dgxlab: Run) -> None:
    assert dgxlab("jobs").out == "no jobs\n"
    assert (dgxlab("attach", "x").next, dgxlab("cancel", "x").next) == ("dgxlab jobs", "dgxlab jobs")


def test_a_new_project_leads_to_its_first_verdict(empty: Path, dgxlab: Run) -> None:
    """Also where the record is still empty, as after a first run that failed early."""
    dgxlab("init")
    for words in ("sessions", "report", "report --update plans/first.md"):
        assert dgxlab(*words.split()).next == "dgxlab ab stock one-thread"
    Store.open(empty / "results.db").close()
    for words in ("report stock", "report --update plans/first.md", "report --check plans/first.md"):
        assert dgxlab(*words.split()).next == "dgxlab ab stock one-thread"
    (empty / "experiments" / "one-thread.yaml").unlink()
    assert dgxlab("report", "--update", "plans/first.md").next == "dgxlab run stock"
    (empty / "results.db").unlink()
    assert dgxlab("sessions").next == "dgxlab run stock"


def test_an_experiment_needs_a_project(empty: Path, dgxlab: Run) -> None:
    ran = dgxlab("plan", "stock")
    assert (ran.rc, ran.error) == (9, f"no experiment 'stock': {empty} is no project, and dgxlab init makes one")


def test_doctor_names_init_too(empty: Path, dgxlab: Run) -> None:
    assert f"none in {empty}\n{'':19}next: dgxlab init\n" in dgxlab("doctor").out


def test_a_new_experiment_is_its_parent(project: Project) -> None:
    """Until it is edited: it differs in its name alone, and is beside its parent."""
    ran = project.ok("new", "experiment", "faster", "--extends", "toy")
    assert ran.out == "experiments/faster.yaml\nedit it, then: dgxlab plan faster\n"
    new, parent = load(Path("experiments/faster.yaml")), load(Path("experiments/toy.yaml"))
    assert (new.name, new.bench, new.gates, new.cmake) == ("faster", parent.bench, parent.gates, parent.cmake)
    again = project.run("new", "experiment", "faster", "--extends", "toy")
    assert (again.rc, again.next) == (2, "dgxlab plan faster")
    assert project.run("new", "experiment", "a/b", "--extends", "toy").error == "'a/b' is no name for an experiment"


def test_a_parent_of_the_same_name_stays(project: Project) -> None:
    (project.folder / "shared").mkdir()
    text = (project.folder / "experiments" / "toy.yaml").read_text()
    (project.folder / "shared" / "base.yaml").write_text(text)
    ran = project.run("new", "experiment", "base", "--extends", "shared/base.yaml")
    assert (ran.rc, "nothing is written over" in ran.error) == (2, True)
    assert (project.folder / "shared" / "base.yaml").read_text() == text


@pytest.mark.parametrize("name", ["128", "1e3", "on", "2026-11-24"])
def test_a_name_that_yaml_takes_for_something_else(project: Project, name: str) -> None:
    project.ok("new", "experiment", name, "--extends", "toy")
    assert load(Path(f"experiments/{name}.yaml")).name == name


def test_a_new_series_takes_a_checkout(project: Project, tmp_path: Path) -> None:
    ran = project.ok("new", "series", "more")
    assert "dgxlab patch export more --tree CHECKOUT -m SUBJECT" in ran.out
    export = "dgxlab patch export more --tree CHECKOUT -m SUBJECT"
    assert project.ok("patch", "list").out == f"more\n  no patches yet: {export}\n"
    assert "left out, as they have no patches yet: more\n" in project.ok("patch", "check").err
    for stray in ("notes/a.txt", "hand/README.md", "hand/0001-x.patch"):  # made by hand, and no series
        (project.folder / "patches" / stray).parent.mkdir(exist_ok=True)
        (project.folder / "patches" / stray).touch()
    assert "hand" not in project.ok("patch", "list").out + project.run("patch", "check", "hand").next
    spec = project.spec("more", "extends: toy.yaml\nseries: [more]\n")
    for command in (("plan", spec), ("patch", "check", "more"), ("patch", "refresh", "more")):
        ran = project.run(*command)
        assert (ran.rc, ran.error, ran.next) == (9, "series more has no patches yet", export)
    near = project.run("patch", "check", "mroe")
    assert (near.rc, near.error.endswith("has no series 'mroe'; there is 'more'")) == (9, True)
    checkout = project.checkout(tmp_path / "llama.cpp")
    (checkout / "new.c").write_text("int more(void);\n")
    project.ok("patch", "export", "more", "--tree", checkout, "-m", "toys : add more")
    assert project.ok("patch", "check", "more").out.endswith("more: no problems\n")
    assert {path.name for path in Path("patches/more").iterdir()} == {"README.md", "series", "toys-add-more.patch"}
    assert project.run("new", "series", "more").next == f"ls -A {project.folder / 'patches' / 'more'}"
