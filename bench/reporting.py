"""Figures of reports from a large record: one session's, and a document with many blocks."""

from __future__ import annotations

from pathlib import Path

from bench.figure import Figure, figure, take_turns
from bench.place import place
from dgxlab.model import BackendOpsBench, Experiment
from dgxlab.store import Store
from tests.journals import source
from tests.report.worlds import Session, h200, numbers, session_of_two

SAMPLES, SESSIONS = 1_000_000, 2_000
EXPERIMENTS = 20
BLOCKS = 20

MARKER = "<!-- dgxlab:report {} -->\n<!-- /dgxlab -->\n"
FORMS = ("ops", "single-stream", "concurrency", "gates", "provenance")


def report(quick: bool) -> Figure:
    """Time `dgxlab report` of a session in the middle of a large record, of the newest of an experiment, and alone."""
    with place() as here:
        db = here.folder / "results.db"
        sessions = write_record(db, *_size(quick))
        what = {"session": [sessions[len(sessions) // 2]], "experiment": ["step-07"], "overview": []}
        sides = [here.command("report", *words, "--db", db) for words in what.values()]
        take_turns(1, *sides)
        walls = dict(zip(what, take_turns(2 if quick else 7, *sides), strict=True))
    samples, count = _size(quick)
    title = f"dgxlab report SESSION, {samples:,} samples of {count:,} sessions"
    return figure("report", title, walls["session"], "s", 1.0, **walls)


def living(quick: bool) -> Figure:
    """Time `dgxlab report --update` of a document, its blocks empty and then current."""
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
    """Make a record of experiments that were measured again and again, each on a build of its own.

    Returns:
        The ids of its sessions, in order.
    """
    made = [_experiment(number) for number in range(EXPERIMENTS)]
    ids = [f"20261120-{number:06}-step" for number in range(sessions)]
    with Store.open(path) as store:
        store.connection.execute("PRAGMA synchronous = OFF")
        for number, session in enumerate(ids[:-1]):
            experiment, each = made[number % EXPERIMENTS], -(-samples // (sessions - 1) // 12)
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
