"""What every use case works with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dgxlab.lab.archive import default_folder
from dgxlab.model import Experiment, Source
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport.host import Host

Watch = Callable[[Mapping[str, Any]], None]
"""Sees every journal event as it is ingested, and the client's own {"event": "note", "note": sentence}."""


@dataclass(frozen=True)
class Lab:
    """What a use case works with: the record, the pins at hand, a way to hosts by name, a folder for raw files."""

    store: Store
    cache: PinCache
    connect: Callable[[str], Host]
    raw: Path = field(default_factory=default_folder)


@dataclass(frozen=True)
class Side:
    """An experiment and the tree that it is about now: an arm as the client knows it."""

    experiment: Experiment
    source: Source


def noted(watch: Watch) -> Callable[[str], None]:
    """Return what tells a sentence to those who watch."""
    return lambda sentence: watch({"event": "note", "note": sentence})
