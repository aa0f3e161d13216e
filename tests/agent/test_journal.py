"""The journal on a disk that is full for a while."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dgxlab.agent.files import Journal, whole_lines
from dgxlab.model.events import EndEvent, LockEvent, NoteEvent
from tests.journals import read


@contextmanager
def room_for(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_event_is_as_it_was_declared(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for wrong in (1, None):
        with pytest.raises(ValueError, match="note"):
            journal.emit(NoteEvent(note=wrong))  # type: ignore[arg-type]
    assert journal.path.read_bytes() == b""


def test_an_event_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.emit(NoteEvent(note="begun"))
    size = journal.path.stat().st_size
    with room_for(size + 100):
        with pytest.raises(OSError, match="File too large"):
            journal.emit(NoteEvent(note="x" * 1000))
        assert journal.path.stat().st_size == size
        journal.emit(LockEvent(state="released", path="x", owner=""))
    journal.emit(EndEvent(status="failed", exit_code=1))
    journal.close()
    assert [(event.seq, event.event) for event in read(journal.path)] == [(0, "note"), (1, "lock"), (2, "end")]
    assert whole_lines(journal.path, 0) == journal.path.read_bytes()
