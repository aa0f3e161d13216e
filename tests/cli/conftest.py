"""A project around the toy and a private home: the command line as people use it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dgxlab.cli import main
from dgxlab.project import MARKER
from dgxlab.store import FLAWED, Store
from tests import toy

EXPERIMENT = """
hypothesis: toys can be measured
llama_cpp:
  pin: "{pin}"
  sources: [{repository}]
models:
  m: {{path: {model}}}
gates:
  - backend-ops: {{op: MUL_MAT, backend: CPU, expect: 4/4, unsupported: 1}}
bench:
  - backend-ops: {{op: MUL_MAT, backend: CPU, where: {{type_a: q4_0, m: 4096, k: 14336, n: [8, 512]}}}}
  - llama-bench: {{model: m, n_prompt: [16, 32], n_gen: 4}}
  - batched-bench: {{model: m, npp: 16, ntg: 4, npl: [1, 2, 4]}}
"""

GITCONFIG = "[user]\n\tname = Toy\n\temail = toy@example.org\n[init]\n\tdefaultBranch = main\n"


@dataclass(frozen=True)
class Machine:
    """What all tests share: a home with pins and builds, the toy's repository with two commits, a model file."""

    home: Path
    repository: Path
    model: Path
    pin: str
    later: str  # a commit that changes ggml/ggml.c


@dataclass(frozen=True)
class Ran:
    rc: int
    out: str
    err: str

    @property
    def error(self) -> str:
        (line,) = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return line.removeprefix("error: ")

    @property
    def next(self) -> str:
        last = self.err.splitlines()[-1]
        assert last.startswith("next: "), self.err
        return last.removeprefix("next: ")


@dataclass
class Project:
    """A folder with patches/ and experiments/toy.yaml, which is the current one."""

    machine: Machine
    folder: Path
    run: Callable[..., Ran]  # runs `dgxlab ARGS` in this process, through its real entry point
    children: list[subprocess.Popen[str]] = field(default_factory=list)

    def ok(self, *args: object) -> Ran:
        ran = self.run(*args)
        assert ran.rc == 0, ran.err
        return ran

    def json(self, *args: object) -> Any:
        return json.loads(self.run(*args, "--format", "json").out)

    @property
    def hosts(self) -> Path:
        return self.folder.parent / "config" / "dgxlab" / "hosts.yaml"

    def spec(self, name: str, text: str) -> Path:
        path = Path("experiments") / f"{name}.yaml"
        (self.folder / path).write_text(text)
        return path

    def spawn(self, *args: object, **options: object) -> subprocess.Popen[str]:
        """Start `dgxlab ARGS` as a process of its own, in a group of its own as a shell does it."""
        child = subprocess.Popen(
            [sys.executable, "-m", "dgxlab", *map(str, args)],
            cwd=self.folder,
            text=True,
            start_new_session=True,
            preexec_fn=_listen_to_ctrl_c,  # noqa: PLW1509 - no other thread is running here
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},  # type: ignore[call-overload]
        )
        self.children.append(child)
        return child

    def end(self) -> None:
        """End what a test that failed has left running: by Ctrl-C, after which a command ends what it must."""
        for child in self.children:
            for signum in (signal.SIGINT, signal.SIGKILL):
                if child.poll() is None:
                    os.killpg(child.pid, signum)
                    with suppress(subprocess.TimeoutExpired):
                        child.communicate(timeout=60)

    def measure(self, *args: str, **env: str) -> None:
        """Run the toy's experiment on the shared machine, in a process of its own."""
        kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "DGXLAB_LOCKS") if name in os.environ}
        home = {"HOME": str(self.machine.home)}
        child = self.spawn("run", "experiments/toy.yaml", *args, env={**home, **kept, **env})
        _, err = child.communicate(timeout=120)
        assert child.returncode == 0, err

    @property
    def where(self) -> str:
        return f"project {self.folder}, record {self.folder}/results.db\n"

    def checkout(self, folder: Path) -> Path:
        toy.git(folder.parent, "clone", "-q", str(self.machine.repository), str(folder))
        toy.git(folder, "checkout", "-q", self.machine.pin)
        return folder


def _listen_to_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    """One home for all tests: what the first of them fetches and builds, the others find."""
    folder = tmp_path_factory.mktemp("machine")
    (folder / "home").mkdir()
    (folder / "home" / ".gitconfig").write_text(GITCONFIG)
    repository, model = folder / "repository", folder / "toy.gguf"
    pin = toy.make_repository(repository)
    source = repository / "ggml" / "ggml.c"
    source.write_text(source.read_text().replace("out of toys", "no toys left"))
    toy.git(repository, "commit", "-q", "-a", "-m", "later")
    model.write_bytes(toy.GGUF)
    return Machine(folder / "home", repository, model, pin, toy.git(repository, "rev-parse", "HEAD"))


@pytest.fixture
def dgxlab(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def run(*args: object) -> Ran:
        monkeypatch.setattr(sys, "argv", ["dgxlab", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capfd.readouterr()
        return Ran(int(ended.value.code or 0), captured.out, captured.err)

    return run


def new_project(machine: Machine, folder: Path, run: Callable[..., Ran]) -> Project:
    (folder / "patches").mkdir(parents=True)
    (folder / "experiments").mkdir()
    (folder / MARKER).touch()
    new = Project(machine, folder, run)
    new.hosts.parent.mkdir(parents=True, exist_ok=True)
    new.spec("toy", EXPERIMENT.format(pin=machine.pin, repository=machine.repository, model=machine.model))
    return new


@pytest.fixture
def project(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dgxlab: Callable[..., Ran]
) -> Iterator[Project]:
    """A new project with nothing recorded, on the shared machine; the current folder."""
    new = new_project(machine, tmp_path / "project", dgxlab)
    monkeypatch.setenv("HOME", str(machine.home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(new.hosts.parent.parent))
    monkeypatch.chdir(new.folder)
    yield new
    new.end()


@pytest.fixture(scope="session")
def record(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A record of runs that count everywhere: other tests disturb some on a busy machine."""
    for _ in range(10):
        new = new_project(machine, tmp_path_factory.mktemp("measured") / "project", refuse)
        new.measure()
        with Store.open(new.folder / "results.db") as opened:
            if not opened.rows(FLAWED):
                return opened.path
    pytest.fail("every run was disturbed")


def refuse(*args: object) -> Ran:
    raise AssertionError("only a test runs commands in this process")


@pytest.fixture
def measured(project: Project, record: Path) -> Project:
    shutil.copyfile(record, project.folder / "results.db")
    return project


def shown_on(terminal: int) -> bytes:
    """Return all that a program writes to a pseudo-terminal until it has ended, and close it."""
    seen = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            seen += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(terminal)
    return seen
