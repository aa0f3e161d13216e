"""The architecture is a test: who may import whom, who alone may import what, and what may not be called."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from tests.conftest import PROJECT

SYSTEM_PATH = re.compile(r"bin[:]/|[:]/(usr/|usr/local/)?s?bin(?![\w/])")
"""A PATH of the system's own folders."""


def test_contracts_hold() -> None:
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"Contracts: {len(contracts)} kept, 0 broken." in ran.stdout


def test_every_module_stands_in_a_layer() -> None:
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    placed = {name.strip() for row in layers for name in row.split("|")}
    inside = (PROJECT / "dgxlab").iterdir()
    modules = {f"dgxlab.{path.stem}" for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in modules if not name.startswith("dgxlab.__")} == placed


def through_a_shell(source: str) -> list[int]:
    """Return the lines with a call that hands words to a shell: shell=, or of a connection env, cd and prefix."""
    lines = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        owner, name = getattr(getattr(call.func, "value", None), "id", ""), getattr(call.func, "attr", "")
        given = {word.arg for word in call.keywords}
        env = name in ("run", "sudo") and "env" in given and owner not in OURS
        if "shell" in given or name in ("cd", "prefix") or env:
            lines.append(call.lineno)
    return lines


OURS = ("subprocess", "child", "programs", "git")
"""What else has a run, with an env that no shell sees."""


def test_nothing_reaches_a_shell_unquoted() -> None:
    """The linter bans by name what else does."""
    modules = sorted((PROJECT / "dgxlab").rglob("*.py"))
    assert [path for path in modules if through_a_shell(path.read_text())] == []
    assert len(modules) > 100


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.Popen(line, shell=asked)",
        "connection.run(line, env={'A': 'b'})",
        "self._host.connection.sudo(line, env=env)",
        "with connection.cd(folder): pass",
        "with connection.prefix(line): pass",
    ],
)
def test_what_reaches_a_shell_is_found(line: str) -> None:
    """Each by a planted example; its harmless likeness is let through."""
    assert through_a_shell(f"subprocess.run(argv, env=env)\nconnection.run(argv)\n{line}") == [3]


def test_tests_find_programs_on_the_callers_path() -> None:
    """Others have what a bare machine lacks; only a Python that every user may run is looked for there."""
    files = sorted(path for folder in ("tests", "faults", "bench") for path in (PROJECT / folder).rglob("*.py"))
    searching = [str(path.relative_to(PROJECT)) for path in files if SYSTEM_PATH.search(path.read_text())]
    assert searching == ["tests/transport/test_ssh_run.py"]
