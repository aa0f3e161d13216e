"""Figures of whole commands, from the start of a process to its end."""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from typer.main import get_command

from bench.figure import Figure, figure, ratios, take_turns
from bench.place import Place, place
from dgxlab.cli import app
from dgxlab.model.events import StepEvent
from tests import toy
from tests.journals import read

TYPER = "typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True)"
COMMAND = """
@{group}.command("{name}")
def command(name: str) -> None:
    '''Do one thing.'''
"""


def as_many_commands() -> str:
    """Return a typer program with the names of all our commands, each with one argument."""
    lines = ["import typer", f"app = {TYPER}"]
    for name, command in get_command(app).commands.items():
        group = f"group_{name.replace('-', '_')}" if hasattr(command, "commands") else "app"
        if group != "app":
            lines += [f"{group} = {TYPER}", f"app.add_typer({group}, name={name!r})"]
        lines += [COMMAND.format(group=group, name=leaf) for leaf in getattr(command, "commands", {name: None})]
    return "\n".join([*lines, "app()"])


def help_page(quick: bool) -> Figure:
    """Time `dgxlab --help` against a typer program with as many commands."""
    with place() as here:
        other = here.folder / "other.py"
        other.write_text(as_many_commands())
        sides = here.command("--help"), lambda: here.timed([sys.executable, other, "--help"])
        take_turns(1, *sides)  # compiles what is imported
        ours, theirs = take_turns(3 if quick else 25, *sides)
    return ratios("help", "dgxlab --help / a typer program with as many commands", 1.4, dgxlab=ours, typer=theirs)


def completion(quick: bool) -> Figure:
    """Time the completion of an experiment's name, among 60."""
    with place() as here:
        (here.project / "experiments").mkdir()
        for number in range(60):
            (here.project / "experiments" / f"toy-{number}.yaml").touch()
        typed = {"COMP_WORDS": "dgxlab plan toy", "COMP_CWORD": "2", "_DGXLAB_COMPLETE": "complete_bash"}
        words = ["env", *(f"{name}={value}" for name, value in typed.items()), sys.executable, "-m", "dgxlab"]
        take_turns(1, lambda: here.timed(words))
        (walls,) = take_turns(3 if quick else 25, lambda: here.timed(words))
    return figure("completion", "an experiment's name completed, of 60", walls, "s", 0.2)


def plan10k(quick: bool) -> Figure:
    """Time `dgxlab plan` on matrices of 10,000 cells; the figure is the slowest kind of matrix."""
    few = list(range(1, 4 if quick else 11))
    many = list(range(1, (len(few) ** 2) + 1))
    axes = {"n_batch": few, "n_ubatch": few}
    entries: dict[str, Mapping[str, Any]] = {
        "one_launch": {"backend-ops": {"op": "MUL_MAT", "backend": "CPU", "where": {"m": many, "k": few, "n": few}}},
        "launch_a_setting": {"llama-bench": {"model": "m", "n_prompt": many, **axes}},
        "launch_a_cell": {"llama-bench": {"model": "m", "n_prompt": 1, **axes, "n_threads": few, "n_depth": few}},
    }
    with place() as here:
        sides = [here.command("plan", here.spec(name, [entry])) for name, entry in entries.items()]
        take_turns(1, *sides)  # the pin comes into the cache
        walls = dict(zip(entries, take_turns(2 if quick else 5, *sides), strict=True))
    worst = [max(turn) for turn in zip(*walls.values(), strict=True)]
    return figure("plan10k", f"dgxlab plan, {len(few) ** 4:,} cells", worst, "s", 1.0, **walls)


def up_to_date(quick: bool) -> Figure:
    """Time `dgxlab run` of an experiment that has nothing left to measure."""
    with place() as here:
        again = here.command("run", here.spec("toy"))
        take_turns(2, again)
        (walls,) = take_turns(2 if quick else 9, again)
    return figure("up_to_date", "dgxlab run, everything up to date", walls, "s", 1.0)


def verdicts(quick: bool) -> Figure:
    """Time `dgxlab verdict` on a file of chains of the default length."""
    chains, random = 10 if quick else 1000, Random(1)  # noqa: S311 - not for secrets
    with place() as here:
        file = here.folder / "chains.jsonl"
        values = [[random.gauss(100, 0.6) for _ in range(17)] for _ in range(chains)]
        file.write_text("".join(json.dumps({"a": of[:9], "b": of[9:], "better": "higher"}) + "\n" for of in values))
        judge = here.command("verdict", "--format", "json", file)
        take_turns(1, judge)
        (walls,) = take_turns(2 if quick else 9, judge)
    return figure("verdicts", f"dgxlab verdict, {chains:,} chains", walls, "s", 1.0)


# -- edit, build, measure ----------------------------------------------------------------------------------------------

SOURCE = "int edited(void) {{ return {}; }}\n"


def edit(quick: bool) -> Figure:
    """Time `dgxlab run` after an edit, up to the start of measuring, minus the time of ninja after such an edit."""
    numbers = itertools.count()
    with place() as here:
        kernel = here.overlay("edited", SOURCE.format(next(numbers)))
        run = here.command("run", here.spec("toy", series=["edited"]))

        def ours() -> float:
            kernel.write_text(SOURCE.format(next(numbers)))
            begin = time.time()
            run()
            return _measuring(here) - begin

        def ninja() -> float:
            (work,) = (folder for folder in (here.root / "work").iterdir() if folder.is_dir())
            (work / "src" / "ggml" / "edited.c").write_text(SOURCE.format(next(numbers)))
            return here.timed(["ninja", "-C", work / "cmake"])

        take_turns(2, ours, ninja)  # the first build, and cmake once more for a file that is new
        walls, alone = take_turns(2 if quick else 7, ours, ninja)
    more = [a - b for a, b in zip(walls, alone, strict=True)]
    return figure("edit", "one overlay edited, run to measuring, less ninja", more, "s", 1.0, dgxlab=walls, ninja=alone)


def try_again(quick: bool) -> Figure:
    """Time `dgxlab try` of changes that the ledger has already, in a checkout of as many files as llama.cpp's."""
    files = {f"src/{number}.c": f"// {number}\n" * 4000 for number in range(20 if quick else 3000)}
    with place({**toy.FILES, **files}) as here:
        _faster(here, 9)()
        again = here.command(*TRY)
        (walls,) = take_turns(2 if quick else 9, again)
    return figure("try_again", "dgxlab try of changes that were tried", walls, "s", 1.0)


def try_overhead(quick: bool) -> Figure:
    """Time `dgxlab try` of a change that is promoted, less the time that its jobs took."""
    speeds = itertools.count(9, -1)
    with place() as here:

        def ours() -> float:
            before = {*(here.root / "jobs").iterdir()} if here.root.exists() else set()
            wall = _faster(here, next(speeds))()
            events = [list(read(job / "journal.jsonl")) for job in {*(here.root / "jobs").iterdir()} - before]
            return wall - sum(of[-1].t - of[0].t for of in events)

        (walls,) = take_turns(2 if quick else 5, ours)
    return figure("try_overhead", "dgxlab try, screen and chain, less its jobs", walls, "s", 2.0)


TRY = ("try", "toy.yaml", "--tree", "../checkout", "--because", "it is faster")


def _faster(here: Place, ms: int) -> Callable[[], float]:
    """Return a try of a checkout whose llama-bench takes so many milliseconds, of 10; the first one makes it."""
    checkout = here.folder / "checkout"
    if not checkout.exists():
        fast = {"llama-bench": {"model": "m", "n_prompt": 16}}
        spec = here.spec("toy", [fast], env={"TOY": "noisy"}, session={"cycles": 8})
        here.command("noise", spec)()
        here.timed(["git", "clone", "--quiet", here.folder / "repository", checkout])
    program = checkout / "tools" / "llama-bench.c"
    program.write_text(toy.FILES["tools/llama-bench.c"].replace("10000000", f"{ms}000000"))
    return here.command(*TRY)


def _measuring(here: Place) -> float:
    """Return when the latest job began to use the device, in unix seconds."""
    job: Path = max((here.root / "jobs").iterdir(), key=lambda folder: folder.name)
    steps = (event for event in read(job / "journal.jsonl") if isinstance(event, StepEvent))
    return next(step.t for step in steps if step.kind in ("gate", "run"))
