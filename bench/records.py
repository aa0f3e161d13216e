"""Figures of the record: the time to write it, its size, and reports from a large one."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from bench.figure import Figure, figure, take_turns
from bench.place import place
from dgxlab.imported import open_file, record, rows_of
from dgxlab.ingest import ingest as fold
from dgxlab.model import Experiment
from dgxlab.store import Store
from dgxlab.tools import BackendOpsBench
from tests.journals import Journal, arm, facts, intend, plan, source
from tests.report.worlds import Session, h200, numbers, session_of_two

# -- folding a journal into the record ---------------------------------------------------------------------------------

PIECE = 1 << 16
"""Bytes of a journal that are ingested in one transaction."""


def ingest(quick: bool) -> Figure:
    """Time the ingest of a journal with many samples; the figure is the slowest kind of journal."""
    samples = 1_000 if quick else SAMPLES
    single, many = _journal(1, samples // 100, 100), _journal(samples // 50, 1, 50)
    judged = _journal(samples // 50, 1, 50, gpu="NVIDIA H200")
    ways: dict[str, tuple[Journal, list[list[bytes]]]] = {
        "one_run": (single, [single.lines()]),
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
    built = replace(arm(), cmake={"GGML_CUDA": "ON"} if gpu else {})
    host = replace(facts(), details={"gpus": [{"uuid": "GPU-1", "name": gpu}] if gpu else []})
    journal = Journal(plan("20261120-120000-bench", [built]), host).job().build().model()
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


# -- importing a console log -------------------------------------------------------------------------------------------

CASES = 10_000

HEAD = (
    "Testing 2 devices\n\nBackend 1/2: CUDA0\n  Device description: NVIDIA H200\n"
    "  Device memory: 143155 MB (142629 MB free)\n\n"
)
TAIL = "  Backend CUDA0: \x1b[1;32mOK\x1b[0m\nBackend 2/2: CPU\n  Skipping\n2/2 backends passed\n\x1b[1;32mOK\x1b[0m\n"


def adopt(quick: bool) -> Figure:
    """Time the import of a large console log into an empty record."""
    cases = CASES // 100 if quick else CASES
    with tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as folder:
        log = write_log(Path(folder), cases)
        turns = range(2 if quick else 7)
        sides = iter([Path(folder) / f"{turn}.db" for turn in turns])
        (walls,) = take_turns(len(turns), lambda: _adopt(log, next(sides), cases))
    return figure("import", f"import of a {cases:,}-case test-backend-ops log", walls, "s", 1.0)


def write_log(folder: Path, cases: int) -> Path:
    """Write a console log with diagnostics between every fourth case and its result, and return its path."""
    lines = []
    for n in range(1, cases + 1):
        time_us = 5 + n / 8
        case = f"  MUL_MAT(type_a=q4_0,type_b=f32,m=4096,n={n},k=14336,bs=[1,1],nr=[1,1],per=[0,1,2,3],k_v=0,o=1): "
        if n % 4 == 0:
            case += "ggml_backend_cuda_graph_compute: CUDA graph warmup complete\n"
        work = 2 * 4096 * 14336 * n
        shown, per_second = f"{work / 1e9:6.2f} GFLOP/run", f"{work / time_us / 1e6:6.2f} TFLOPS"
        lines.append(
            f"{case}         {10_000:8d} runs - {time_us:8.2f} us/run - {shown} - \x1b[1;34m{per_second}\x1b[0m\n"
        )
    path = folder / "perf.log"
    path.write_text(f"{HEAD}{''.join(lines)}{TAIL}")
    return path


def _adopt(log: Path, db: Path, cases: int) -> float:
    """Return the seconds from a file to a record on this machine's disk."""
    with Store.open(db) as store:
        begin = time.perf_counter()
        imported = open_file(log)
        record(store, imported)
        seconds = time.perf_counter() - begin
        counted = len(rows_of(store, imported.import_id))
    if counted != cases:
        raise RuntimeError(f"{counted} of {cases} cases arrived")
    return seconds


# -- reports -----------------------------------------------------------------------------------------------------------

SAMPLES, SESSIONS = 1_000_000, 2_000
EXPERIMENTS = 20
BLOCKS = 20

MARKER = "<!-- dgxlab:report {} -->\n<!-- /dgxlab -->\n"
FORMS = ("ops", "single-stream", "concurrency", "gates", "provenance")


def report(quick: bool) -> Figure:
    """Time `dgxlab report` with a session of a large record, with an experiment, and without arguments."""
    with place() as here:
        db = here.folder / "results.db"
        sessions = write_record(db, *_size(quick))
        what = {"session": [sessions[len(sessions) // 2]], "experiment": ["step-07"], "overview": []}
        sides = [here.command("report", *words, "--db", db) for words in what.values()]
        take_turns(1, *sides)
        walls = dict(zip(what, take_turns(2 if quick else 7, *sides), strict=True))
    samples, count = _size(quick)
    title = f"dgxlab report SESSION, {samples:,} samples of {count:,} sessions"
    return figure("report", title, walls["session"], "s", 0.5, **walls)


def page(quick: bool) -> Figure:
    """Time `dgxlab report --html` of many tables; beside it, of one experiment with pictures, and the size of both."""
    with place() as here:
        db, pages = here.folder / "results.db", {name: here.folder / f"{name}.html" for name in ("tables", "pictures")}
        write_record(db, *_size(quick))
        steps = [f"step-{number:02}" for number in range(EXPERIMENTS)]
        words = {"tables": ["--form", "ops", *steps], "pictures": ["step-07"]}
        sides = [here.command("report", *words[name], "--html", path, "--db", db) for name, path in pages.items()]
        take_turns(1, *sides)
        walls = dict(zip(pages, take_turns(2 if quick else 7, *sides), strict=True))
        sizes = {f"bytes with {name}": path.stat().st_size for name, path in pages.items()}
        if (tables := pages["tables"].read_text().count("<table>")) != EXPERIMENTS:
            raise RuntimeError(f"{tables} of {EXPERIMENTS} tables are there")
    taken = figure("page", f"dgxlab report --html, {EXPERIMENTS} tables", walls["tables"], "s", 1.0, **walls)
    return replace(taken, counts=sizes)


def listed(quick: bool) -> Figure:
    """Time `dgxlab sessions` on a large record."""
    with place() as here:
        db = here.folder / "results.db"
        write_record(db, *_size(quick))
        side = here.command("sessions", "--db", db)
        take_turns(1, side)
        (walls,) = take_turns(2 if quick else 7, side)
    samples, count = _size(quick)
    return figure("sessions", f"dgxlab sessions, {samples:,} samples of {count:,} sessions", walls, "s", 0.5)


def living(quick: bool) -> Figure:
    """Time `dgxlab report --update` of a document whose blocks are empty, and then current."""
    with place() as here:
        db, plan = here.folder / "results.db", here.project / "plan.md"
        write_record(db, *_size(quick))
        blocks = [f"form={FORMS[n % len(FORMS)]} experiment=step-{n:02}" for n in range(BLOCKS - 3)]
        steps = ",".join(f"step-{n:02}" for n in range(EXPERIMENTS))
        blocks += ["form=levers", "form=verdicts experiment=w4a16", f"form=steps experiment={steps} baseline=step-00"]
        empty = "".join(f"# {block}\n\n{MARKER.format(block)}\n" for block in blocks)
        update = here.command("report", "--update", plan, "--db", db)

        def filled() -> float:
            plan.write_text(empty)
            return update()

        take_turns(1, filled)
        walls, again = take_turns(2 if quick else 7, filled, update)
    title = f"dgxlab report --update, {BLOCKS} blocks"
    return figure("living", title, walls, "s", 3.0, filled=walls, current=again)


def _size(quick: bool) -> tuple[int, int]:
    return (SAMPLES // 200, SESSIONS // 40) if quick else (SAMPLES, SESSIONS)


def write_record(path: Path, samples: int, sessions: int) -> list[str]:
    """Write a record of experiments that were measured many times, each time with another build.

    Returns:
        The ids of its sessions, in order.
    """
    experiments = [_experiment(number) for number in range(EXPERIMENTS)]
    ids = [f"20261120-{number:06}-step" for number in range(sessions)]
    with Store.open(path) as store:
        store.connection.execute("PRAGMA synchronous = OFF")
        for number, session in enumerate(ids[:-1]):
            experiment, each = experiments[number % EXPERIMENTS], -(-samples // (sessions - 1) // 12)
            tree = source([experiment.name])
            Session(store, experiment, session, tree=tree).build().gates().runs(numbers(100 + number, each)).end()
        two = session_of_two(store, ids[-1], noise=0.004).build().gates()
        two.chains(lambda step, role, cycle: 1000.0 + cycle - 20 * (role == "candidate")).gates(after=True).end()
        ((counted,),) = store.connection.execute("SELECT count(*) FROM samples")
    if counted < samples:
        raise RuntimeError(f"{counted} of {samples} samples arrived")
    return ids


def _experiment(number: int) -> Experiment:
    name = f"step-{number:02}"
    ops = BackendOpsBench("MUL_MAT", "CUDA0", {"type_a": ("q4_0", "q4_K"), "n": (1, 8, 512)})
    return h200(name=name, hypothesis=f"{name} is faster", series=(name,), bench=(ops, *h200().bench[1:]))


# -- size of the file, indices included --------------------------------------------------------------------------------

SHARE = 10
"""The record for the size is smaller than that of the reports by this factor."""


def size(quick: bool) -> Figure:
    """Measure the size of a record of sessions and of one with an imported log; the figure is the larger."""
    share = 200 if quick else SHARE
    with tempfile.TemporaryDirectory(prefix="dgxlab-bench-") as name:
        folder = Path(name)
        write_record(folder / "sessions.db", SAMPLES // share, SESSIONS // min(share, 40))
        with Store.open(folder / "imported.db") as store:
            imported = open_file(write_log(folder, CASES // (share // SHARE)))
            record(store, imported)
        values = sum(len(each.values) for row in imported.reading.rows for each in row.values)
        with Store.open(folder / "sessions.db") as store:
            (row,) = store.rows("SELECT count(*) AS n FROM samples")
        measured = [
            (folder / name).stat().st_size / count
            for name, count in (("sessions.db", row["n"]), ("imported.db", values))
        ]
    counts = dict(zip(("bytes a sample of sessions", "bytes a value of an import"), map(round, measured), strict=True))
    worst = figure("size", "size of the record by sample", [max(measured)], "B", 150.0)
    return Figure(**{**vars(worst), "counts": counts})
