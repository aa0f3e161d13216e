"""The help, the promise of every leaf command, and what asking for it costs."""

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from dgxlab.cli import app
from tests.cli.conftest import Ran
from tests.conftest import PROJECT

ROOT: Any = typer.main.get_command(app)
HEAVY = ("pydantic", "yaml", "sqlite_utils", "jinja2", "rich", "gguf", "numpy", "dgxlab.lab", "dgxlab.model")


def leaves(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every command that is no group, with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, (*path, name))
        else:
            yield (*path, name), command


LEAVES = dict(leaves(ROOT))


def parse(command: Any, args: list[str], parent: Any = None) -> list[str]:
    """Parse a command line as the program would, without doing anything; returns the words of its command."""
    context = command.make_context("dgxlab", args, parent=parent)
    if not hasattr(command, "commands"):
        return []
    name, leaf, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    return [name, *parse(leaf, rest, context)]


def test_every_command_is_there() -> None:
    assert [" ".join(path) for path in LEAVES] == [
        "init",
        *("run", "ab", "try", "watch", "noise", "gate", "plan", "bisect", "ablate", "report", "sessions"),
        *(
            "jobs",
            "attach",
            "cancel",
            "logs",
            "import",
            "export",
            "serve-record",
            "verdict",
            "bytes",
            "doctor",
            "mcp",
            "schema",
        ),
        *("tries list", "tries show", "tries export"),
        *("session reject", "session note", "session diff"),
        *("new experiment", "new series"),
        *("patch list", "patch check", "patch refresh", "patch export", "pin id", "pin check"),
        *("host add", "host trust", "host list"),
        *("host check", "host clean", "db check", "db text", "db merge", "db rebuild"),
    ]


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_has_an_example_that_parses(path: tuple[str, ...], dgxlab: Any) -> None:
    ran = dgxlab(*path, "--help")
    assert (ran.rc, ran.err) == (0, "")
    (example,) = [line.strip() for line in ran.out.splitlines() if line.strip().startswith("Example: ")]
    words = shlex.split(example.removeprefix("Example: "))
    assert words[0] == "dgxlab"
    assert parse(ROOT, words[1:]) == list(path)
    assert LEAVES[path].help.splitlines()[0].endswith(".")
    parameters = LEAVES[path].get_params(typer.Context(LEAVES[path]))
    assert all(parameter.help for parameter in parameters if parameter.name != "help")
    options = {option for parameter in parameters for option in parameter.opts}
    assert {"--format", "--quiet"} <= options or path == ("schema",)


def test_summaries_fit_their_line_and_no_arguments_show_them(dgxlab: Any) -> None:
    for group in ((), ("new",), ("patch",), ("pin",), ("db",), ("host",), ("session",), ("tries",)):
        assert "..." not in dgxlab(*group, "--help").out.split("Commands:")[1]
    ran: Ran = dgxlab()
    assert ran.rc == 2
    assert "Commands:" in ran.out + ran.err


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from dgxlab.cli import main\ntry: main()\nexcept SystemExit: print(*sys.modules, file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, check=True)
    assert "Commands:" in ran.stdout
    assert [name for name in HEAVY if name in ran.stderr.split()] == []


def test_schema_is_the_shipped_one(dgxlab: Any, tmp_path: Path) -> None:
    shipped = (PROJECT / "schema" / "experiment.schema.json").read_text()
    assert dgxlab("schema").out == shipped
    ran = dgxlab("schema", "--output", tmp_path / "schema.json")
    assert (ran.rc, ran.out, ran.err) == (0, "", "")
    assert (tmp_path / "schema.json").read_text() == shipped
