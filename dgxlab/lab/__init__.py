"""The use cases: run an experiment, follow what runs, settle what was left behind, keep hosts in order.

session  one pipeline for run, gate, ab, noise and screen
provision  what a host has, and what it lacks is sent: build tools, sources, synthetic models
jobs     detached work: start, follow, settle, adopt what others started
outlook  what an A/B session will see, and how long it takes
raw      what the programs printed, fetched, checked and kept
rebuild  a record made again from what jobs left
clean    what may go from a host
doctor   what is missing, here and on a host
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dgxlab.model import Experiment, Source, events
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport.host import Host

Watch = Callable[[events.Event], None]
"""Sees every journal event as it is ingested, and the client's own notes."""


def raw_folder() -> Path:
    """Return where raw files are kept: with the user's data, for a cache may be emptied at any time."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "dgxlab" / "raw"


@dataclass(frozen=True)
class Lab:
    """What a use case works with: the record, the pins at hand, a way to hosts by name, a folder for raw files."""

    store: Store
    cache: PinCache
    connect: Callable[[str], Host]
    raw: Path = field(default_factory=raw_folder)


@dataclass(frozen=True)
class Side:
    """An experiment and the tree that it is about now: an arm as the client knows it."""

    experiment: Experiment
    source: Source


def noted(watch: Watch) -> Callable[[str], None]:
    """Return what tells a sentence to those who watch."""
    return lambda sentence: watch(events.NoteEvent(note=sentence))
