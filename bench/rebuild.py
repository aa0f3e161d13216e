"""The figure of the loop that an engineer turns all day: edit one source, build, measure."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from bench.figure import Figure, figure, take_turns
from bench.place import Place, place
from dgxlab.agent.journal import read
from dgxlab.model.events import StepEvent

SOURCE = "int edited(void) {{ return {}; }}\n"


def edit(quick: bool) -> Figure:
    """Time from typing `dgxlab run` after one edit to the start of measuring, less ninja alone after such an edit."""
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


def _measuring(here: Place) -> float:
    """Return when the latest job began to use the device, in unix seconds."""
    job: Path = max((here.root / "jobs").iterdir(), key=lambda folder: folder.name)
    steps = (event for event in read(job / "journal.jsonl") if isinstance(event, StepEvent))
    return next(step.t for step in steps if step.kind in ("gate", "run"))
