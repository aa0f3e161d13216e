"""The use cases: run an experiment, follow jobs, bring unfinished ones to their end, keep hosts in order.

A job is one plan that runs, detached, on a host. Its subject is what it measures: a digest of its kind and experiments.

session  one pipeline for run, gate, ab, noise and screen
loop     a try of an optimisation loop: stages, budgets, its end
search   sessions that find which patch or commit made a difference
upgrade  the check of a newer pin with every series
provision  check a host and send what it lacks: build tools, sources, synthetic models
jobs     detached jobs: start, follow, settle, adopt those of other clients
progress  how far a running job is
missing  the plan of what a request still lacks in the record
request  what a command asks for: experiments, sources, options
watching  a checkout that is built and screened each time it is saved
outlook  the effects that an A/B session can detect, and how long jobs and their steps take
raw      the programs' output: fetched, checked and kept
rebuild  rebuild a record from the jobs' files
clean    remove unused files from a host
starter  make a project, an experiment, a series
fleet    the same request on several hosts at once
cluster  hosts that start their jobs through Slurm
doctor   check what is missing, here and on a host
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dgxlab.agent.facts import host_id
from dgxlab.model import Experiment, Source, digest, events
from dgxlab.project import user_folder
from dgxlab.source import PinCache
from dgxlab.store import Store
from dgxlab.transport.host import Host

Watch = Callable[[events.Event], None]
"""Called with every journal event as it is recorded, and with the client's own notes."""


@dataclass(frozen=True)
class Lab:
    """What every use case works with: the record, the pin cache, hosts by name, and the folder of raw files."""

    store: Store
    cache: PinCache
    connect: Callable[[str], Host]
    # a data folder: a cache may be emptied at any time
    raw: Path = field(default_factory=lambda: user_folder("XDG_DATA_HOME", ".local/share") / "raw")

    @property
    def client(self) -> str:
        """Digest of this machine, user and record, which plans have: a record may have jobs that others started."""
        return digest([host_id(), str(self.store.path.resolve())], 16)


@dataclass(frozen=True)
class Side:
    """An experiment and the source to build for it: one arm of a job."""

    experiment: Experiment
    source: Source
    diff: str = ""  # of a checkout, its changes over the pin


def noted(watch: Watch) -> Callable[[str], None]:
    """Return a function that passes a sentence to `watch` as a note."""
    return lambda sentence: watch(events.NoteEvent(note=sentence))
