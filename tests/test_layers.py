"""The architecture is a test: who may import whom, and who alone may import what."""

from __future__ import annotations

import subprocess
import sys
import tomllib

from tests.conftest import PROJECT


def test_contracts_hold() -> None:
    """Every import-linter contract of pyproject.toml is kept."""
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    ran = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert f"Contracts: {len(contracts)} kept, 0 broken." in ran.stdout


def test_every_module_stands_in_a_layer() -> None:
    """A new module is given its place, or the contracts say nothing about it."""
    contracts = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    placed = {name.strip() for row in layers for name in row.split("|")}
    inside = (PROJECT / "dgxlab").iterdir()
    modules = {f"dgxlab.{path.stem}" for path in inside if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert {name for name in modules if not name.startswith("dgxlab.__")} == placed
