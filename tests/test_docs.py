"""The documents say what is true: they are executed and compared, not proofread."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.errors import DgxlabError
from tests.cli.test_help import ROOT, parse
from tests.conftest import PROJECT

README = (PROJECT / "README.md").read_text()


def section(title: str) -> str:
    """Return the text of one section of the README."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def commands(text: str) -> list[list[str]]:
    """Return the dgxlab command lines in shell text, as words behind `dgxlab`."""
    lines = re.findall(r"(?m)^\s*(?:\$ |\S*/)?dgxlab (.*)$", text)
    return [shlex.split(line, comments=True) for line in lines]


def test_cogged_parts_are_up_to_date() -> None:
    """The commands' help and the recorded results are those of this program and this record."""
    ran = subprocess.run(
        [sys.executable, "-m", "cogapp", "--check", "README.md"],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, f"run: cog -r README.md\n{ran.stdout}{ran.stderr}"


def test_sections_stand_in_their_order() -> None:
    """Results first, then how to get them; no other section."""
    titles = re.findall(r"(?m)^## (.*)$", re.sub(r"(?s)```.*?```", "", README))
    assert titles == [
        "Current results",
        "Quick start",
        "On a remote machine",
        "How a number is made",
        "How a verdict is made",
        "Commands",
        "Layout",
        "Reliability and threat model",
        "Provenance and licences",
    ]


def test_make_targets_exist() -> None:
    """Every `make` that a document names."""
    targets = set(re.findall(r"(?m)^([a-z-]+):", (PROJECT / "Makefile").read_text()))
    named = set(re.findall(r"\bmake ([a-z]+(?:-[a-z]+)?)(?=[`\s]|$)", "\n".join(re.findall(r"`[^`]+`", README))))
    shell = set(re.findall(r"(?m)^make ([a-z-]+)", README))
    assert {"demo", "test"} <= shell
    assert named | shell <= targets


def test_paths_of_the_layout_exist() -> None:
    """Every row, and no module of the package is left out."""
    rows = [line.split("|")[1] for line in section("Layout").splitlines() if line.startswith("| `")]
    paths = [path for row in rows for path in re.findall(r"`([^`]+)`", row)]
    assert [path for path in paths if not (PROJECT / path).exists()] == []
    assert [path for path in paths if (PROJECT / path).is_dir() != path.endswith("/")] == []
    inside = {path.name for path in (PROJECT / "dgxlab").iterdir()} - {"__pycache__", "py.typed", "templates"}
    named = {Path(path).name for path in paths if path.startswith("dgxlab/")}
    assert {name for name in inside if not name.startswith("__")} == named


def test_experiments_and_files_named_exist() -> None:
    """Each experiment in the section of its folder, and every file named in a command."""
    folder = PROJECT / "experiments"
    listed = []
    for part in (folder / "README.md").read_text().split("\n## ")[1:]:
        device = re.findall(r"`(.*?)/`", part)[0]
        listed += [folder / device / f"{name}.yaml" for name in re.findall(r"(?m)^\| `([^`]+)` \|", part)]
    assert sorted(listed) == sorted(folder.rglob("*.yaml"))
    for path in re.findall(r"(?:experiments|patches|schema)/[\w./-]+\w", README):
        assert (PROJECT / path).exists(), path
    for name in ("LICENSE", "CHANGELOG.md", "SECURITY.md", "docs/reliability.md"):
        assert (PROJECT / name).is_file()


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "Makefile",
        "experiments/README.md",
        "patches/README.md",
        "CHANGELOG.md",
        "docs/reliability.md",
        "SECURITY.md",
    ],
)
def test_commands_in_documents_parse(document: str) -> None:
    """Whatever a reader may copy is a command line that the program takes."""
    text = (PROJECT / document).read_text().replace("$(BIN)/", ".venv/bin/")
    for words in commands(text if document == "Makefile" else "\n".join(re.findall(r"(?s)```sh\n(.*?)```", text))):
        parse(ROOT, words)
    for name in re.findall(r"`dgxlab ([a-z]+(?: [a-z]+)?)[ `]", text):
        group, _, leaf = name.partition(" ")
        assert group in ROOT.commands, name
        assert leaf in getattr(ROOT.commands[group], "commands", {leaf: None}), name


def test_exit_codes_are_those_of_the_errors() -> None:
    """No code that the program has not, and none described twice."""
    codes = [int(code) for code in re.findall(r"(?m)^\| (\d+) \|", section("Commands"))]
    known = {kind.exit_code for kind in DgxlabError.__subclasses__()}
    assert codes == sorted(set(codes))
    assert set(codes) - {0, 1} <= known


def test_messages_of_the_troubleshooting_table_are_the_programs() -> None:
    """Every part of a sentence that a reader would look for stands in the source."""
    source = "".join(path.read_text() for path in sorted((PROJECT / "dgxlab").rglob("*.py")))
    plain = re.sub(r"\{[^{}\n]*\}", "...", re.sub(r'"\n\s*f?"', "", source))
    rows = re.findall(r"(?m)^\| (`.*?) \| .* \| .* \|$", section("On a remote machine"))
    said = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip() for message in said for part in message.split("...") if part.strip()]
    assert len(rows) >= 8
    assert [part for part in parts if part not in plain] == []


def test_captured_run_is_about_the_shipped_quickstart() -> None:
    """The pin and the gate of the capture are those of experiments/cpu/quickstart.yaml."""
    spec = (PROJECT / "experiments" / "cpu" / "quickstart.yaml").read_text()
    pin = re.search(r"pin: ([0-9a-f]{40})", spec)
    count = re.search(r"expect: (\d+/\d+)", spec)
    assert pin
    assert count
    shown = section("Quick start")
    assert f"fetching {pin[1][:12]} from" in shown
    assert f"gate MUL_MAT on CPU: passed, {count[1]}, 306 unsupported" in shown


def test_merge_driver_is_the_one_that_gitattributes_names() -> None:
    """The set-up in the README fits .gitattributes and the command's arguments."""
    attributes = (PROJECT / ".gitattributes").read_text()
    driver = re.search(r'git config merge\.(\S+)\.driver "\.venv/bin/dgxlab (db merge) %A %B"', README)
    assert driver
    assert f"results.db merge={driver[1]} " in attributes


def test_no_promises() -> None:
    """No badges, no roadmap, nothing to come."""
    assert not re.search(r"(?i)roadmap|coming soon|todo|(is|are) planned|!\[|shields", README)
