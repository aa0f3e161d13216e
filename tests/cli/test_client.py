"""The client away from its checkout and from Linux: a wheel in an environment of its own, and a Mac."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from bench.place import far, place
from tests.cli.conftest import Machine, Ran
from tests.conftest import PROJECT


def ended(argv: list[object], folder: Path, env: dict[str, str]) -> Ran:
    ran = subprocess.run([*map(str, argv)], cwd=folder, env=env, capture_output=True, text=True, check=False)
    return Ran(ran.returncode, ran.stdout, ran.stderr)


# -- on macOS: tests/darwin.py says what it lacks ----------------------------------------------------------------------

MAC = [sys.executable, "-m", "tests.darwin"]


def test_every_module_of_the_client_is_imported_on_a_mac() -> None:
    """All but the agent, which runs on hosts; of that only what the client calls or sends."""
    code = """
from tests.darwin import become
become()
import pkgutil, sys, dgxlab
names = [found.name for found in pkgutil.walk_packages(dgxlab.__path__, "dgxlab.")]
for name in names:
    if not name.startswith("dgxlab.agent.") and not name.endswith("__main__"):
        __import__(name)
print(*sys.modules)
"""
    ran = ended([sys.executable, "-c", code], PROJECT, dict(os.environ))
    assert ran.rc == 0, ran.err
    assert {"dgxlab.lab.session", "dgxlab.transport.ssh", "dgxlab.tools.load"} <= set(ran.out.split())
    assert "dgxlab.agent.child" not in ran.out.split()


def test_this_machine_is_no_host_on_a_mac() -> None:
    with place() as here:
        env = {**here.env, "PYTHONPATH": str(PROJECT)}
        ran = ended([*MAC, "run", here.spec("toy")], here.project, env)
        assert (ran.rc, ran.out, ran.next) == (3, "", "dgxlab host add --help")
        assert ran.error == "host local is this machine, and jobs run on Linux alone, which this is not (darwin)"
        ran = ended([*MAC, "doctor"], here.project, {**env, "PATH": ""})
        assert "brew install git" in ran.out


def test_a_mac_measures_on_a_host() -> None:
    """From a spec to a report, over ssh; what the record holds is sound."""
    with far() as remote:
        here = remote.here
        env = {**here.env, "PYTHONPATH": str(PROJECT)}
        ran = ended([*MAC, "run", here.spec("toy"), "--host", "box", "--format", "json"], here.project, env)
        assert ran.rc == 0, ran.err
        assert json.loads(ran.out)["tables"]
        for words in (["db", "check"], ["jobs", "--host", "box"], ["host", "check", "box"]):
            ran = ended([*MAC, *words], here.project, env)
            assert ran.rc == 0, ran.err


# -- installed, as pipx does -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program of a wheel, in an environment that sees our dependencies and not the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PROJECT / "dgxlab", source / "dgxlab", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT / name, source)
    pip = [sys.executable, "-m", "pip", "--quiet"]
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", folder, source], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (wheel,) = folder.glob("*.whl")
    python = folder / "venv" / "bin" / "python"
    subprocess.run([*pip, "--python", python, "install", "--no-deps", wheel], check=True)
    (packages,) = (folder / "venv" / "lib").glob("*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.with_name("dgxlab")


@pytest.mark.network
def test_a_wheel_works_outside_a_checkout(installed: Path, machine: Machine, tmp_path: Path) -> None:
    """The project is found from a folder below its marker; the agent and every data file are in the wheel."""
    lab = tmp_path / "lab"
    lab.mkdir()
    env = {**os.environ, "HOME": str(machine.home), "PATH": f"{installed.parent}:{os.environ['PATH']}"}
    env.pop("PYTHONPATH", None)
    assert ended([installed, "init", "--cpu"], lab, env).rc == 0
    stock = lab / "experiments" / "stock.yaml"
    text = re.sub(r"pin: \w+", f"pin: {machine.pin!r}", stock.read_text())
    stock.write_text(re.sub(r"sources: .*", f"sources: [{machine.repository}]", text))
    ran = ended([installed, "plan", "stock"], lab / "plans", env)
    assert ran.rc == 0, ran.err
    assert "test-backend-ops test -o MUL_MAT -b CPU" in ran.out
    ran = ended([installed, "host", "check"], lab / "plans", env)
    assert ran.rc == 0, ran.err
    ran = ended([installed, "report", "--published", "llama"], lab / "plans", env)
    assert ran.next == "dgxlab ab stock one-thread"
