"""dgxlab watch: a checkout, screened each time it is saved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Option

from dgxlab.cli._app import Workspace
from dgxlab.cli._out import Out, plural
from dgxlab.cli.run import JobOptions, SpecArgument
from dgxlab.units import change, duration

if TYPE_CHECKING:
    from dgxlab.lab.watching import Round
    from dgxlab.model.events import Event


def watch(
    spec: SpecArgument,
    tree: Path = Option(..., "--tree", help="The llama.cpp checkout to watch, built instead of the spec's series."),
    *,
    options: JobOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Build, gate and screen a checkout each time it is saved.

    One line a round, against the spec's own build; Ctrl-C ends it, and the round that runs. A screen needs the noise
    of the experiment: `dgxlab noise` measures it once.

    Example: dgxlab watch stock --tree ../llama.cpp
    """
    from dgxlab.lab.watching import rounds

    request = options.request("screen", spec, spec, tree=tree, wait_s=60 * options.wait)
    workspace = options.at(workspace, request.experiments[0])
    out.note(workspace.where)
    count = 0
    with workspace.lab(create=True) as lab, suppress(KeyboardInterrupt):  # also while a line is printed
        for each in rounds(lab, request, partial(_bar, out)):
            count = each.number
            out.lines([vars(each)], partial(_line, each))
    out.note(f"stopped after {plural(count, 'round')}")


@contextmanager
def _bar(out: Out) -> Iterator[Callable[[Event], None]]:
    """Show the progress of one round, without the results of its steps: a round is one line."""
    from dgxlab.cli._display import display

    with display(out) as show:
        yield lambda event: show(event) if event.event in ("lock", "step", "progress") else None


def _line(done: Round) -> str:
    words = [f"{number} {how}" for how, number in Counter(f"gates {how}" for how in done.gates).items()]
    for row in done.verdicts:
        effect = "" if row["effect"] is None else f" {change(row['effect'])} %"
        words.append(f"{row['name']} {row['verdict']}{effect}")
    text = done.error or ", ".join(words)
    return f"{time.strftime('%H:%M:%S')} {done.name[-8:]} {text} ({duration(done.seconds)})"
