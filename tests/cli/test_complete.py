"""What a shell completes, asked as a shell asks."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.conftest import Project

Complete = Callable[[str], list[str]]


@pytest.fixture
def complete(measured: Project, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Return the words that bash offers for the last word of a command line; nothing else is printed or written."""
    measured.spec("toy-b", "extends: toy.yaml\n")
    (measured.folder / "hosts.yaml").write_text("dgx: {ssh: dgx}\n")
    (measured.folder / "patches" / "tuned").mkdir(parents=True)
    (measured.folder / "patches" / "tuned" / "series").touch()
    files = set(measured.folder.rglob("*"))

    def ask(line: str) -> list[str]:
        monkeypatch.setenv("_DGXLAB_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        ran = measured.ok()
        monkeypatch.delenv("_DGXLAB_COMPLETE")
        assert (ran.err, set(measured.folder.rglob("*"))) == ("", files)
        return ran.out.split()

    return ask


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("dgxlab pl", ["plan"]),
        ("dgxlab plan t", ["toy", "toy-b"]),
        ("dgxlab --version --db results.db plan t", ["toy", "toy-b"]),
        ("dgxlab ab toy toy-", ["toy-b"]),
        ("dgxlab run toy --host ", ["local", "dgx"]),
        ("dgxlab host check d", ["dgx"]),
        ("dgxlab patch check ", ["tuned"]),
        ("dgxlab plan nosuch", []),
        ("dgxlab ablate ", ["tuned"]),
        ("dgxlab pin check b6900 t", ["tuned"]),
        ("dgxlab bisect 0 1 --series t", ["tuned"]),
        ("dgxlab bisect 0 1 --like toy-", ["toy-b"]),
    ],
)
def test_names(complete: Complete, line: str, words: list[str]) -> None:
    assert sorted(complete(line)) == sorted(words)


def test_sessions_by_either_name(complete: Complete, measured: Project) -> None:
    (job,) = [row["session"] for row in measured.json("sessions")]
    assert complete("dgxlab attach ") == [job[-6:]]
    assert complete(f"dgxlab logs {job[:8]}") == [job]
    assert sorted(complete("dgxlab report t")) == ["toy", "toy-b"]
    assert job[-6:] in complete("dgxlab report ")
    assert complete(f"dgxlab --db {measured.folder / 'none.db'} attach ") == []


def test_a_log_that_another_command_left_stays(complete: Complete, measured: Project, tmp_path: Path) -> None:
    record, left = measured.folder / "results.db", tmp_path / "left.db"
    with closing(sqlite3.connect(record)) as other:
        other.execute("UPDATE jobs SET intent_at = intent_at + 1")
        other.commit()
        for suffix in ("", "-wal"):
            shutil.copy(f"{record}{suffix}", f"{left}{suffix}")
    before = [Path(f"{left}{suffix}").read_bytes() for suffix in ("", "-wal")]
    assert before[1]
    assert len(complete(f"dgxlab --db {left} attach ")) == 1
    assert [Path(f"{left}{suffix}").read_bytes() for suffix in ("", "-wal")] == before


def test_what_cannot_be_read_completes_nothing(complete: Complete, measured: Project) -> None:
    record, hosts = measured.folder / "results.db", measured.folder / "hosts.yaml"
    record.write_bytes(b"no database" * 1000)
    hosts.write_text("dgx: [")
    assert complete("dgxlab attach ") == complete("dgxlab run toy --host ") == []
