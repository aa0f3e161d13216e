"""The figure of folding a journal into the record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.figure import Figure, figure, take_turns
from dgxlab.ingest import ingest as fold
from dgxlab.store import Store
from tests.journals import Journal, arm, facts, intend, plan

SAMPLES = 100_000

PIECE = 1 << 16
"""Bytes that following a job gives at a time; each is a transaction."""


def ingest(quick: bool) -> Figure:
    """Time the ingest of a journal with many samples; the figure is the slowest kind of journal."""
    samples = SAMPLES // 100 if quick else SAMPLES
    one, many = _journal(1, samples // 100, 100), _journal(samples // 50, 1, 50)
    judged = _journal(samples // 50, 1, 50, gpu="NVIDIA H200")
    ways: dict[str, tuple[Journal, list[list[bytes]]]] = {
        "one_run": (one, [one.lines()]),
        "small_runs": (many, [many.lines()]),
        "small_runs_in_pieces": (many, list(_pieces(many.lines()))),
        "small_runs_of_a_gpu": (judged, [judged.lines()]),
    }
    sides = [partial(_fold, journal, pieces, samples) for journal, pieces in ways.values()]
    walls = dict(zip(ways, take_turns(2 if quick else 5, *sides), strict=True))
    worst = [max(turn) for turn in zip(*walls.values(), strict=True)]
    return figure("ingest", f"ingest of {samples:,} samples", worst, "s", 2.0, **walls)


def _journal(runs: int, cells: int, samples: int, gpu: str = "") -> Journal:
    """Return a job of `runs` runs, each of `cells` cells with `samples` values, the cold one among them."""
    made = replace(arm(), cmake={"GGML_CUDA": "ON"} if gpu else {})
    host = replace(facts(), details={"gpus": [{"uuid": "GPU-1", "name": gpu}] if gpu else []})
    journal = Journal(plan("20261120-120000-bench", [made]), host).job().build().model()
    for run in range(runs):
        journal.run({cell + 1: [100 + run % 7 + sample / 8 for sample in range(samples - 1)] for cell in range(cells)})
    return journal.end()


def _pieces(lines: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Yield lines by the piece."""
    piece: list[bytes] = []
    for line in lines:
        piece.append(line)
        if sum(map(len, piece)) >= PIECE:
            yield piece
            piece = []
    yield piece


def _fold(journal: Journal, pieces: Sequence[list[bytes]], samples: int) -> float:
    """Return the seconds that a journal takes into an empty record, on this machine's disk."""
    with (
        tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as folder,
        Store.open(Path(folder) / "results.db") as store,
    ):
        intend(store, journal)
        begin = time.perf_counter()
        for piece in pieces:
            fold(store, journal.plan.job_id, piece)
        seconds = time.perf_counter() - begin
        ((counted,),) = store.connection.execute("SELECT count(*) FROM samples")
        if counted != samples:
            raise RuntimeError(f"{counted} of {samples} samples arrived")
        return seconds
