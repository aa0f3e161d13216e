"""Writes that fail: a small part of the campaign, and that a program under the library sees them fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from faults.campaign import trials
from faults.fault import Broken, seeded
from faults.kinds import io
from faults.refusal import refusing


def test_the_record() -> None:
    """Filled, opened, copied and merged."""
    tally = trials(io.RECORD, 2, range(6))
    assert tally.failures == []
    assert any("refused" in word for word in tally.met)


@pytest.mark.slow
def test_an_agent() -> None:
    """A job ends with a sentence or is lost, and what it left is what was executed."""
    assert trials(io.AGENT, 2, range(3)).failures == []


def test_a_write_that_fails_is_met(tmp_path: Path) -> None:
    """And is told; what says something else than that the disk refused is found."""
    record = tmp_path / "record"
    record.mkdir()
    with refusing(tmp_path, os.environ) as program:
        made = io.Refusals(program, {})
        made.do("open", record, None)
        (record / "results.db").unlink()
        refused = program.do("open", record, 5, errno.ENOSPC, lasting=True)
        assert (refused["traceback"], refused["writes"] >= 5) == ("", True)
        assert io.NAMED.search(refused["error"])
        (record / "results.db").write_text("no database")
        with pytest.raises(Broken, match="is not an SQLite database"):
            made.do("open", record, seeded(1, "io", 1))
