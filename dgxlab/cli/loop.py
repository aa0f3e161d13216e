"""dgxlab try, tries: one step of an optimisation loop, and the ledger of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import App, Workspace
from dgxlab.cli._out import Format, Out, table
from dgxlab.cli.run import JobOptions, seconds
from dgxlab.errors import BuildFailed, CheckFailed, GateFailed
from dgxlab.project import root
from dgxlab.units import change, duration

app = App("The tries of loops: hypotheses, diffs, decisions.")
_EXIT = {"promoted": 0, "build": BuildFailed.exit_code, "gate": GateFailed.exit_code}
"""The exit code of a try, by how it ended; CheckFailed's for all others."""
_OVER = {"baseline": "the baseline", "parent": "the parent", "pin": "pin {pin:.12}, the baseline's series included"}
"""What the lines of a try are counted over, by `diff_over`."""


def try_(
    baseline: str = Argument(
        help="What to improve: a YAML file, or its name in experiments/.", autocompletion=_complete.experiments
    ),
    tree: Path = Option(..., "--tree", help="The llama.cpp checkout to try, committed or not."),
    because: str = Option(..., "--because", help="The hypothesis: why it should be faster, in a sentence."),
    parent: str | None = Option(
        None, "--parent", metavar="TRY", help="Compare with this promoted try, 0 for BASELINE; else with the newest."
    ),
    max_minutes: float | None = Option(None, "--max-minutes", help="Stop once the ledger's tries took so long."),
    max_tries: int = Option(0, "--max-tries", min=0, help="Stop once the ledger has so many tries; 0: no limit."),
    *,
    options: JobOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Build, gate, screen and measure a change, for a loop.

    Prints one JSON object. The chain is held only if the screen does not drop the change. A try is promoted if its
    chain is significant at the ledger's level, no cell is slower, all gates pass, and no held-out cell is slower. The
    next try is compared with it. The same changes are measured again only against another --parent; a try that was
    interrupted goes on.

    Exit codes: 0 promoted, 5 a gate failed, 7 it does not build, 11 not promoted, 8 and 10 host not fit to measure, 13
    the budget is spent.

    Example: dgxlab try stock --tree ../llama.cpp --because "larger tiles"
    """
    from dgxlab.cli._display import display
    from dgxlab.judgement import tries
    from dgxlab.lab import loop

    request = options.request("run", baseline)
    asked = loop.Try(request.experiment, tree, because, parent, 60.0 * options.wait, seconds(max_minutes), max_tries)
    with options.at(workspace, request.experiments[0]).lab(create=True) as lab:
        with display(out, logged=("lock", "progress")) as watch:
            try_id, reused = loop.attempt(lab, asked, watch)
        told = {**tries.told(lab.store, try_id), "reused": reused}
    replace(out, format=Format.json).result(told, "")
    out.note(line(told))
    raise typer.Exit(_EXIT.get(told["ended"], CheckFailed.exit_code))


@app.add
def list_(
    baseline: str = Argument("", help="Only the ledger of this baseline.", autocompletion=_complete.experiments),
    host: str = Option("", help="Only the ledger on this host.", autocompletion=_complete.hosts),
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """List the tries of the record, in order.

    Example: dgxlab tries list stock
    """
    from dgxlab.judgement import tries
    from dgxlab.report.tries import changed, ended

    with workspace.store() as store:
        rows = tries.ledger(store, baseline, host)
    texts = [
        {
            "try": str(row.number),
            "baseline": f"{row.baseline} on {row.host}",
            "ended": ended(row),
            "lines": changed(row),
            "took": duration(row.seconds),
            "because": row.because,
        }
        for row in rows
    ]
    out.result(rows, lambda: table(texts, right=("try", "lines"), cut=True) if texts else "no tries")


_TryArgument = Annotated[str, Argument(metavar="TRY", help="A try: its number, or the last six characters of its id.")]
_OfOption = Annotated[
    str, Option("--of", metavar="BASELINE", help="The ledger that the number is of, if it has several.")
]


@app.add
def show(number: _TryArgument, of: _OfOption = "", *, workspace: Workspace, out: Out) -> None:
    """Show a try: how it ended, its verdicts and gates, and its changes.

    They are those over the baseline with its series, or over the parent. For tries of an older dgxlab they are those
    over the pin, with all of the baseline's series.

    Example: dgxlab tries show 17
    """
    from dgxlab.judgement import tries
    from dgxlab.report.tries import ended

    with workspace.store() as store:
        row = tries.find(tries.ledger(store, of), number)
        told, diff = tries.told(store, row.try_id), tries.change_of(store, row.try_id)
    names = ("try_id", "because", "ended", "why", "p", "level", "tree", "parent")
    facts = [f"{name:<8} {text}" for name in names if (text := {**told, "ended": ended(row)}[name]) is not None]
    facts.append(f"{'lines':<8} {told['lines']}, over {_OVER[told['diff_over']].format(**told)}")
    facts += [f"{'session':<8} {job_id}" for job_id in told["sessions"]]
    cells = []
    for cell in told["cells"]:
        effect = "" if cell["effect"] is None else f" {change(cell['effect'])} %"
        cells.append(f"{cell['name']}: {cell['verdict']}{effect}")
    out.result({**told, "diff": diff}, "\n".join([*facts, *cells, "", diff]))


@app.add
def export(
    number: _TryArgument,
    name: str = Argument(help="The new series: a folder under patches/."),
    of: _OfOption = "",
    *,
    workspace: Workspace,
    out: Out,
) -> None:
    """Turn the changes of a try into a series of one patch.

    It is written as by `patch export`; its message is the hypothesis. It applies to the pin alone, and so contains the
    baseline's series and the promoted tries before: a spec names it in place of the baseline's series, not after them.

    Example: dgxlab tries export 17 wider-tiles
    """
    from dgxlab.judgement import tries
    from dgxlab.lab import loop
    from dgxlab.report.tries import ended
    from dgxlab.stats import Ended

    with workspace.lab() as lab:
        row = tries.find(tries.ledger(lab.store, of), number)
        patches = loop.export(lab, workspace.project or root(), name, row)
    if (how := ended(row)) != Ended.PROMOTED.value:
        out.note(f"try {row.number} was not promoted (ended: {how})")
    out.result({"series": name, "patches": patches}, "\n".join(f"patches/{name}/{patch}" for patch in patches))


def line(told: Mapping[str, Any]) -> str:
    """Return a try as a line for people."""
    how = "promoted" if told["promoted"] else told["ended"] if told["ended"] == "overfitted" else "dropped"
    stage = f" by {told['ended']}" if how == "dropped" else ""
    again = "measured before, " if told["reused"] else ""
    return f"try {told['number']}: {again}{how}{stage} ({told['why']}; {duration(told['seconds'])})"
