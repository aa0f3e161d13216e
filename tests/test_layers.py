"""The architecture is a test: who may import whom, who alone may import what, and what may not be called."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator

import pytest

from tests.conftest import PROJECT

SHELLS = {"os": {"system", "popen"}, "subprocess": {"getoutput", "getstatusoutput"}}
"""Functions that hand a line to a shell, by module."""

UNSAFE_YAML = {"load", "load_all", "safe_load", "safe_load_all", "full_load", "unsafe_load"}
"""yaml's own loaders: they expand aliases and take the last of two keys, which the project's reader refuses."""

REMOTE = ("run", "sudo")
"""What starts something on a fabric connection: its env goes into a shell's line unquoted."""

OURS = ("subprocess", "child", "programs", "git")
"""Who else has a run, with an env that no shell sees."""


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


def banned(source: str) -> Iterator[str]:
    """Yield `line: what` for every call that hands words to a shell unquoted, or YAML to another reader."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield from (f"{node.lineno}: {what}" for what in _banned_call(node))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names} & _functions(node.module or "")
            yield from (f"{node.lineno}: {node.module}.{name}" for name in sorted(names))


def _functions(module: str) -> set[str]:
    return UNSAFE_YAML if module == "yaml" else SHELLS.get(module, set())


def _banned_call(call: ast.Call) -> Iterator[str]:
    given = {word.arg: word.value for word in call.keywords}
    if "shell" in given and getattr(given["shell"], "value", None) is not False:
        yield "shell="
    if not isinstance(call.func, ast.Attribute):
        return
    owner, name = getattr(call.func.value, "id", ""), call.func.attr
    if name in _functions(owner):
        yield f"{owner}.{name}"
    if name in ("cd", "prefix"):
        yield f"{name}()"
    if name in REMOTE and "env" in given and owner not in OURS:
        yield f"{name}(env=)"


def test_nothing_reaches_a_shell_unquoted() -> None:
    """Commands are argv lists, YAML has one reader, and of a connection nothing is used that does not quote."""
    modules = sorted((PROJECT / "dgxlab").rglob("*.py"))
    found = [f"{path.relative_to(PROJECT)}:{call}" for path in modules for call in banned(path.read_text())]
    assert found == []
    assert len(modules) > 100


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("subprocess.run(line, shell=True)", "shell="),
        ("subprocess.Popen(line, shell=asked)", "shell="),
        ("os.system(line)", "os.system"),
        ("from os import path, popen", "os.popen"),
        ("subprocess.getoutput(line)", "subprocess.getoutput"),
        ("connection.run(line, env={'A': 'b'})", "run(env=)"),
        ("self._host.connection.sudo(line, env=env)", "sudo(env=)"),
        ("with connection.cd(folder): pass", "cd()"),
        ("with connection.prefix(line): pass", "prefix()"),
        ("yaml.load(text, Loader=yaml.SafeLoader)", "yaml.load"),
        ("from yaml import safe_load", "yaml.safe_load"),
    ],
)
def test_what_is_banned_is_found(source: str, found: str) -> None:
    """Each by a planted example, with its line; its harmless likeness is let through."""
    harmless = "import os\nsubprocess.run(argv, env=env, shell=False)\nconnection.run(argv)\nyaml.parse(text)\n"
    assert list(banned(harmless + source)) == [f"5: {found}"]


def test_tests_find_programs_on_the_callers_path() -> None:
    """Others have what a bare machine lacks; only a Python that every user may run is looked for there."""
    files = sorted(path for folder in ("tests", "faults", "bench") for path in (PROJECT / folder).rglob("*.py"))
    found = [str(path.relative_to(PROJECT)) for path in files if SYSTEM_PATH.search(path.read_text())]
    assert found == ["tests/transport/test_ssh_run.py"]
