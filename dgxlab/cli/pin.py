"""dgxlab pin: llama.cpp's commits as pins."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import App, Group, Workspace, experiment, readable_experiments
from dgxlab.cli._out import Out, table
from dgxlab.cli.patch import known_series
from dgxlab.cli.run import JobOptions
from dgxlab.cli.search import shown_verdicts
from dgxlab.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from dgxlab.lab.upgrade import Upgrade


_UNCOMPILED = {
    "some": "CUDA files were not compiled, as GGML_CUDA is off",
    "all": "CUDA files and their tests alone: nothing was tried, as GGML_CUDA is off",
}


class _Pins(Group):
    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["id", *args])


app = App(
    'Name llama.cpp\'s commits, and try newer ones. "dgxlab pin NAME" is short for "dgxlab pin id NAME".', cls=_Pins
)


@app.add
def id_(
    name: str = Argument(help="A tag, a branch, or the beginning of a commit's id."),
    source: list[str] | None = Option(None, help="Where to look; by default where this project's specs say."),
    *,
    out: Out,
) -> None:
    """Print the line of a spec that pins a tag, a branch or a commit.

    Example: dgxlab pin id b6900
    """
    from dgxlab.model import UPSTREAM
    from dgxlab.source import PinCache, full_id

    known = source or list(dict.fromkeys(chain.from_iterable(spec.sources for spec in readable_experiments(out.note))))
    pin = full_id(name, known or [UPSTREAM], PinCache(), out.note)
    out.result({"name": name, "pin": pin}, f"llama_cpp: {{pin: {pin}}}  # {name}")


@app.add
def check(
    name: str = Argument(help="The new pin: a tag, a branch, or the beginning of a commit's id."),
    names: list[str] | None = Argument(
        None, metavar="[SERIES]...", help="Series to check; all by default.", autocompletion=_complete.series
    ),
    like: str = Option(
        "stock",
        metavar="EXPERIMENT",
        help="What to build and measure, on the old pin.",
        autocompletion=_complete.experiments,
    ),
    screen: bool = Option(True, "--screen/--no-screen", help="Compare with the old pin, one bracket a row."),
    *,
    options: JobOptions,
    workspace: Workspace,
    out: Out,
) -> None:
    """Try a newer pin with every series: build, gates, and a screen.

    One row says whether a series applies, builds and passes there, and how it compares with the old pin.

    The first row is llama.cpp without one. Gates are the parity gates of --like, and of the operations that have one
    in the specs that apply the series; their counts are recorded, not compared. A screen needs the noise of the host.

    Example: dgxlab pin check b6900 --like quickstart
    """
    from dgxlab.cli._display import display
    from dgxlab.lab.upgrade import PinCheck
    from dgxlab.source import PinCache, full_id

    others = readable_experiments(out.note)
    spec = experiment(like, options.set_, options.host)
    wanted = known_series(Path(spec.root), names or ())
    sources = list(dict.fromkeys(chain(*(each.sources for each in others), spec.sources)))
    pin = full_id(name, sources, PinCache(trusted=options.trust_source), out.note)
    if pin == spec.pin:
        raise UsageError(f"{spec.name} is on pin {pin[:12]} already", next="name a newer one, or another --like")
    asked = PinCheck(spec, pin, sources, screen, 60 * options.wait)
    rows = []
    with options.at(workspace, spec).lab(create=True) as lab, display(out) as watch:
        for row in asked.rows(lab, wanted, others, watch):
            rows.append(row)
            tried = "not tried" if row.uncompiled == "all" else "checked"
            out.note(f"{row.series or 'stock'}: {row.reason or tried}")
    out.result({"pin": pin, "from": spec.pin, "rows": rows}, lambda: _table(rows), outcomes=True)
    if bad := [row for row in rows if not row.well]:
        message = f"not everything is well on pin {pin[:12]}: {', '.join(row.series or 'stock' for row in bad)}"
        raise CheckFailed(message, next=bad[0].next)


def _table(rows: Sequence[Upgrade]) -> str:
    from dgxlab.judgement import session_verdict
    from dgxlab.store import alias

    yes = {True: "yes", False: "no", None: "-"}
    shown = []
    notes = []
    for row in rows:
        name = row.series or "stock"
        verdict = session_verdict([verdict.verdict for _, verdict in row.verdicts]) if row.verdicts else "-"
        first, *more = [f"{op} {count}" for op, count in row.gates.items()] or [yes[row.passed]]
        words = {"series": name, "applies": yes[row.applies], "builds": yes[row.builds], "gates": first}
        shown.append({**words, "screen": verdict, "sessions": " ".join(alias(each) for each in row.sessions) or "-"})
        shown += [{column: gate if column == "gates" else "" for column in shown[0]} for gate in more]
        notes += [f"{name}: {text}" for text in shown_verdicts(row.verdicts)]
        notes += [f"{name}: {row.reason}{f'; next: {row.next}' if row.next else ''}"] if row.reason else []
        notes += [f"{name}: {problem}" for problem in row.problems]
    for which, why in _UNCOMPILED.items():
        names = [row.series for row in rows if row.uncompiled == which]
        notes += [f"{', '.join(names)}: {why}"] if names else []
    return "\n".join([table(shown), *([""] if notes else []), *notes])
