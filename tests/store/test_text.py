"""The record as text: what git shows of a commit that added to it."""

import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.store import Store, textconv
from tests.journals import compared
from tests.store.conftest import measured


def record(path: Path, *jobs: str) -> Path:
    with Store.open(path) as store:
        measured(store, *map(compared, jobs))
    return path


def test_more_rows_are_more_lines(tmp_path: Path) -> None:
    small = list(textconv(record(tmp_path / "one.db", "job-1")))
    large = list(textconv(record(tmp_path / "two.db", "job-1", "job-2")))
    kept = [line for line in small if not line.startswith(("jobs ", "seals ", "_sqlite", "sqlite"))]
    assert [line for line in large if line in set(kept)] == kept
    assert any(line.startswith("verdicts ") and '"faster"' in line for line in small)
    assert max(map(len, large)) < 4000
    assert small[0].startswith("schema ")


def test_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    path = record(tmp_path / "record" / "x.db", "job-1")
    before = (path.read_bytes(), sorted(path.parent.iterdir()))
    assert list(textconv(path))
    assert (path.read_bytes(), sorted(path.parent.iterdir())) == before


def test_git_shows_rows(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        return subprocess.run(
            ["git", *identity, *words], cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    (tmp_path / ".gitattributes").write_text("results.db diff=dgxlab-db -text\n")
    git("config", "diff.dgxlab-db.textconv", f"{sys.executable} -m dgxlab db text")
    record(tmp_path / "results.db", "job-1")
    git("add", "results.db", ".gitattributes")
    git("commit", "-qm", "one")
    record(tmp_path / "results.db", "job-2")
    shown = git("diff")
    assert "+runs {" in shown
    assert "job-2" in shown
    assert not [line for line in shown.splitlines() if line.startswith("-samples")]


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("no database\n")
    with pytest.raises(SpecError):
        list(textconv(tmp_path / "x.db"))
