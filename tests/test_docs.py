"""The documents say what is true: they are executed and compared, not proofread."""

import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.errors import DgxlabError
from tests.cli.test_help import ROOT, parse
from tests.conftest import PROJECT

README = (PROJECT / "README.md").read_text()
PAGES = {path.stem: path.read_text() for path in (PROJECT / "docs").glob("*.md")}
RECORD = f"file:{PROJECT / 'results.db'}?mode=ro&immutable=1"
GENERATED = ("README.md", "docs/architecture.md", "docs/cli.md", "docs/record.md", "docs/spec.md")
WITH_COMMANDS = [
    "README.md",
    "Makefile",
    "CHANGELOG.md",
    "SECURITY.md",
    "experiments/README.md",
    *(f"docs/{name}.md" for name in sorted(PAGES)),
]


def shell(text: str) -> str:
    """Return what a reader may copy into a shell."""
    return "\n".join(re.findall(r"(?s)```sh\n(.*?)```", text))


def commands(text: str) -> list[list[str]]:
    lines = re.findall(r"(?m)^\s*(?:\$ |\S*/)?dgxlab (.*)$", text)
    return [shlex.split(line, comments=True) for line in lines]


def test_generated_parts_are_up_to_date() -> None:
    """The commands' help, the keys of a spec and the recorded results are those of this program and this record."""
    argv = [sys.executable, "-m", "cogapp", "--check", *GENERATED]
    ran = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, f"run: cog -r {' '.join(GENERATED)}\n{ran.stdout}{ran.stderr}"


def test_the_readme_is_short() -> None:
    """It has a result, a start and a map; everything else has a page of its own."""
    assert len(README.encode()) <= 9000
    assert README.count("\n## ") == 7
    assert "`make test`" in README  # what .ci/run calls


def test_no_row_of_a_table_is_too_wide() -> None:
    pages = [PROJECT / "README.md", *(PROJECT / "docs").glob("*.md"), *(PROJECT / "plans").rglob("*.md")]
    rows = [(path.name, line) for path in pages for line in path.read_text().splitlines() if line.startswith("|")]
    assert [row for row in rows if len(row[1]) > 140] == []


def test_pages_build_strictly(tmp_path: Path) -> None:
    """Every link and anchor between pages leads somewhere."""
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    ran = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert (ran.returncode, (tmp_path / "tutorial" / "index.html").is_file()) == (0, True), ran.stderr


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        *(
            str(path)
            for path in sorted(
                path.relative_to(PROJECT)
                for folder in ("docs", "experiments", "kernels", "patches", "plans")
                for path in (PROJECT / folder).rglob("*.md")
            )
        ),
    ],
)
def test_links_to_files_lead_somewhere(document: str) -> None:
    """Those that mkdocs does not see: from the README, between plans, kernels and patches."""
    path = PROJECT / document
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text())
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_make_targets_exist() -> None:
    makefile = (PROJECT / "Makefile").read_text()
    targets = {name for line in re.findall(r"(?m)^([a-z- ]+):", makefile) for name in line.split()}
    named = set()
    for text in (README, *PAGES.values()):
        named |= {word for line in re.findall(r"(?m)^make ([a-z -]+)", shell(text)) for word in line.split()}
        named |= set(re.findall(r"`make ([a-z-]+)`", text))
    assert {"demo", "test", "docs", "faults", "bench"} <= named
    assert named <= targets


def test_the_demo_ends_with_the_command_that_shows_its_record() -> None:
    recipe = re.search(r'(?m)^demo:.*\n\t(.*)\n\t@echo "next: (.*)" >&2$', (PROJECT / "Makefile").read_text())
    assert recipe
    (_, _, spec, *record), (dot, activate, *told) = map(str.split, recipe.groups())
    assert [dot, activate] == [".", "$(BIN)/activate"]  # for all commands that are printed then
    assert told == ["&&", "dgxlab", "report", Path(spec).stem, *record]
    parse(ROOT, told[2:])


def test_experiments_are_listed() -> None:
    folder = PROJECT / "experiments"
    listed = []
    for part in (folder / "README.md").read_text().split("\n## ")[1:]:
        device = re.findall(r"`(.*?)/`", part)[0]
        listed += [folder / device / f"{name}.yaml" for name in re.findall(r"(?m)^\| `([^`]+)` \|", part)]
    assert sorted(listed) == sorted(folder.rglob("*.yaml"))


@pytest.mark.parametrize("document", WITH_COMMANDS)
def test_commands_in_documents_parse(document: str) -> None:
    """Whatever a reader may copy is a command line that the program takes."""
    text = (PROJECT / document).read_text().replace("$(BIN)/", ".venv/bin/")
    for words in commands(text if document == "Makefile" else shell(text)):
        parse(ROOT, words)
    for name in re.findall(r"`dgxlab ([a-z]+(?: [a-z]+)?)[ `]", text):
        group, _, leaf = name.partition(" ")
        assert group in ROOT.commands, name
        assert leaf in {"", *getattr(ROOT.commands[group], "commands", {leaf: None})}, name


def test_every_command_is_in_the_readme() -> None:
    table = README.split("\n## Commands\n")[1].split("\n## ")[0]
    assert {name for name in ROOT.commands if not re.search(rf"`(dgxlab )?{name}\b", table)} == set()


def test_exit_codes_are_those_of_the_errors() -> None:
    codes = [int(code) for code in re.findall(r"(?m)^\| (\d+) \|", PAGES["cli"])]
    known = {kind.exit_code for kind in DgxlabError.__subclasses__()}
    assert codes == sorted(set(codes))
    assert set(codes) - {0, 1} <= known


def test_messages_of_the_troubleshooting_table_are_the_programs() -> None:
    """Every part of a sentence that a reader would look for is in the source."""
    source = "".join(path.read_text() for path in sorted((PROJECT / "dgxlab").rglob("*.py")))
    plain = re.sub(r"\{[^{}\n]*\}", "...", re.sub(r'"\n\s*f?"', "", source))
    rows = re.findall(r"(?m)^\| (`.*?) \| .* \| .* \|$", PAGES["remote"])
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    parts = [part.strip() for message in messages for part in message.split("...") if part.strip()]
    assert len(rows) >= 8
    assert [part for part in parts if part not in plain] == []


def test_merge_driver_is_the_one_that_gitattributes_names() -> None:
    """The set-up in the page of the record fits .gitattributes and the command's arguments."""
    attributes = (PROJECT / ".gitattributes").read_text()
    driver = re.search(r'git config merge\.(\S+)\.driver "\.venv/bin/dgxlab (db merge) %A %B"', PAGES["record"])
    assert driver
    assert f"results.db merge={driver[1]} " in attributes


@pytest.mark.parametrize("query", re.findall(r"(?s)```sql\n(.*?)```", PAGES["record"]))
def test_queries_of_the_record_page_give_rows(query: str) -> None:
    with sqlite3.connect(RECORD, uri=True) as record:
        assert record.execute(query).fetchall()


def test_the_record_page_has_every_table_and_view() -> None:
    with sqlite3.connect(RECORD, uri=True) as record:
        names = {name for (name,) in record.execute("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")}
    assert {name for name in names if f"`{name}`" not in PAGES["record"]} == set()
