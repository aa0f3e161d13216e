"""What every test needs: a sealed environment, and one real build of llama.cpp shared by those that need it."""

import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab.errors import DgxlabError
from dgxlab.lab import Lab
from dgxlab.lab.request import Request
from dgxlab.lab.session import Outcome, run
from dgxlab.model import Experiment, ParityGate
from dgxlab.source import PinCache
from dgxlab.spec import load
from dgxlab.store import Store
from dgxlab.transport.host import Host
from dgxlab.transport.local import LocalTransport
from tests import toy
from tests.journals import PIN, told

PROJECT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"
OCTOBER = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"  # the newer pin, for which the series have patches too
CACHE = Path(os.environ.get("DGXLAB_TEST_CACHE") or Path.home() / ".cache" / "dgxlab-tests")
"""Pins and builds of the real llama.cpp, kept between test runs: building takes minutes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a skip is a failure, but for a GPU, cgroups or root")


SLOW = ("cli", "faults", "kernels", "lab", "transport")
"""Folders whose tests build something or talk to an sshd."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-fast` leaves out, and what measures llama.cpp: it needs the quickstart's run."""
    for item in items:
        if item.path.relative_to(PROJECT / "tests").parts[0] in SLOW:
            item.add_marker("slow")
        if "quickstart" in getattr(item, "fixturenames", ()):
            item.add_marker("alone")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Under --no-skips turn a skipped test into a failed one, except where the machine or the user cannot run it."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()  # type: ignore[attr-defined]
    machine = item.get_closest_marker("gpu") or item.get_closest_marker("cgroups")
    may = machine or (os.getuid() != 0 and item.get_closest_marker("slurm"))
    if report.skipped and item.config.getoption("--no-skips") and not may:
        report.outcome = "failed"
        report.longrepr = f"skipped where nothing may be skipped: {report.longrepr}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "results.db") as opened:
        yield opened


@pytest.fixture(scope="session", autouse=True)
def locks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give the tests benchmark locks of their own: who measures on this machine does not see them, nor they him."""
    folder = tmp_path_factory.mktemp("locks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DGXLAB_LOCKS", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def hermetic_seal(request: pytest.FixtureRequest, tmp_path: Path, locks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the test a private home, a fixed locale and clock zone, no stray settings, and the loopback alone."""
    home = tmp_path / "home"
    home.mkdir()
    for name in list(os.environ):
        if name.startswith(("DGXLAB_", "GIT_", "XDG_", "SSH_", "GGML_", "LLAMA_", "CUDA_")):
            monkeypatch.delenv(name)
    fixed = {"HOME": home, "TZ": "UTC", "LC_ALL": "C.UTF-8", "COLUMNS": "120", "DGXLAB_LOCKS": locks}
    for name, value in fixed.items():
        monkeypatch.setenv(name, str(value))
    if not request.node.get_closest_marker("network") and not request.node.get_closest_marker("llama"):
        monkeypatch.setattr(socket.socket, "connect", _loopback_only(socket.socket.connect))


def _loopback_only(connect: Callable[..., None]) -> Callable[..., None]:
    def guarded(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
            raise AssertionError(f"a test may not leave the machine: {address}")
        connect(self, address)

    return guarded


@pytest.fixture(scope="session")
def pin_cache() -> PinCache:
    cache = PinCache(CACHE / "llama.cpp.git")
    try:
        cache.ensure(PIN, ["pypi:llama-cpp-python==0.3.30"], lambda note: None)
    except DgxlabError as error:
        pytest.skip(f"llama.cpp cannot be had here: {error.message} {error.details}")
    return cache


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """The toy's repository, a host folder whose builds tests share, and the toy's pin."""
    folder = tmp_path_factory.mktemp("toy")
    return folder / "repository", folder / "root", toy.make_repository(folder / "repository")


@dataclass
class Bench:
    """A place to run experiments in: a record of its own, the shared pins and builds."""

    lab: Lab
    root: Path

    def run(self, experiment: Experiment, kind: str = "run", **options: Any) -> tuple[Outcome, list[dict[str, Any]]]:
        """Run an experiment here; returns how it ended and every event seen."""
        events: list[dict[str, Any]] = []
        request = Request(kind, experiment, **options)
        return run(self.lab, request, lambda event: events.append(told(event))), events


@pytest.fixture(scope="session")
def make_bench(pin_cache: PinCache, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Bench]:
    def make() -> Bench:
        root = CACHE / "host"
        folder = tmp_path_factory.mktemp("record")
        store = Store.open(folder / "results.db")
        lab = Lab(store, pin_cache, lambda name: Host(LocalTransport(str(root))), folder / "raw")
        return Bench(lab, root)

    return make


@dataclass
class Quickstart:
    """One whole run of the quickstart experiment on this machine."""

    bench: Bench
    experiment: Experiment
    outcome: Outcome
    events: list[dict[str, Any]]


@pytest.fixture(scope="session")
def quickstart(make_bench: Callable[[], Bench]) -> Quickstart:
    """Run the shipped quickstart once; later tests look at what it left."""
    bench = make_bench()
    experiment = load(PROJECT / "experiments" / "cpu" / "quickstart.yaml")
    outcome, events = bench.run(experiment)
    return Quickstart(bench, experiment, outcome, events)


@pytest.fixture(scope="session")
def llama_bin(make_bench: Callable[[], Bench]) -> Path:
    """Return the folder of the quickstart's programs, built and held to a gate of a second, but not measured."""
    return _built(make_bench(), "quickstart")


@pytest.fixture(scope="session")
def server_bin(make_bench: Callable[[], Bench]) -> Path:
    """Return the folder of the same build's programs, with llama-server."""
    return _built(make_bench(), "serve-cpu")


def _built(bench: Bench, name: str) -> Path:
    experiment = load(PROJECT / "experiments" / "cpu" / f"{name}.yaml")
    outcome, events = bench.run(replace(experiment, gates=(ParityGate("SQR", "CPU"),)), kind="gate")
    assert outcome.error is None
    (build,) = (event for event in events if event["event"] == "build")
    return bench.root / "builds" / build["build_id"] / "bin"
