"""dgxlab patch: series on a pin."""

from __future__ import annotations

import shlex
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgxlab import project
from dgxlab.cli._app import App, TrustSourceOption, experiment
from dgxlab.cli._out import Out, plural, typed
from dgxlab.errors import CheckFailed, SpecError, UsageError

if TYPE_CHECKING:
    from dgxlab.source import PinCache

app = App("List, check, refresh and export patch series.")

NameArgument = Annotated[str, typer.Argument(help="The series: a folder under patches/.", show_default=False)]
PinOption = Annotated[
    str | None, typer.Option("--pin", help="A llama.cpp commit; by default the one that this project's specs name.")
]
SourceOption = Annotated[
    list[str] | None, typer.Option("--source", help="Where to find the pin; by default where the specs say.")
]


@app.add("list")
def list_(*, out: Out) -> None:
    """List the series of this project with their digests.

    Example: dgxlab patch list
    """
    from dgxlab import series

    rows, lines = [], []
    for each in series.list_all(project.root()):
        patches = [patch.name for patch in each.patches]
        overlays = [f"{overlay.source} -> {overlay.dest}" for overlay in each.overlays]
        rows.append({"name": each.name, "digest": each.digest, "patches": patches, "overlays": overlays})
        lines += [f"{each.name}@{each.digest[:12]}", *(f"  {line}" for line in (*patches, *overlays))]
    out.result(rows, "\n".join(lines) or "no series")


@app.add("check")
def check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Series to check; all by default.", show_default=False)
    ] = None,
    pin: PinOption = None,
    source: SourceOption = None,
    trust_source: TrustSourceOption = False,
    *,
    out: Out,
) -> None:
    """Check that series are whole and apply to a pin exactly.

    Example: dgxlab patch check
    """
    from dgxlab import series

    root = project.root()
    known = series.names(root)
    if unknown := [name for name in names or () if name not in known]:
        raise UsageError(f"{root / 'patches'} has no series {unknown[0]!r}", next="dgxlab patch list")
    at, cache = _pin(root, pin, source, out, trust_source)
    problems = {name: series.check(root, name, cache, at) for name in names or known}
    lines = []
    for name, listed in problems.items():
        lines += [f"{name}: {plural(len(listed), 'problem')}", *(f"  {problem}" for problem in listed)]
    out.result({"pin": at, "problems": problems}, "\n".join([f"pin {at[:12]}", *(lines or ["no series"])]))
    if bad := [name for name, listed in problems.items() if listed]:
        raise CheckFailed(
            f"not every series applies to pin {at[:12]}", next=f"dgxlab patch refresh {bad[0]} --pin {at}"
        )


@app.add("refresh")
def refresh(
    name: NameArgument,
    pin: PinOption = None,
    source: SourceOption = None,
    trust_source: TrustSourceOption = False,
    *,
    out: Out,
) -> None:
    """Carry a series to a pin by three-way merges; write it anew.

    Example: dgxlab patch refresh backend-ops-shapes
    """
    from dgxlab import series

    root = project.root()
    at, cache = _pin(root, pin, source, out, trust_source)
    done = series.refresh(root, name, cache, at)
    out.result(
        {"pin": at, "changed": list(done.changed)}, "\n".join(f"wrote {n}" for n in done.changed) or "nothing to change"
    )


@app.add("export")
def export(
    name: NameArgument,
    tree: Annotated[Path, typer.Option("--tree", help="A llama.cpp checkout on the pin.", show_default=False)],
    message: Annotated[str, typer.Option("--message", "-m", help="Commit message for what is not committed.")] = "",
    pin: PinOption = None,
    source: SourceOption = None,
    trust_source: TrustSourceOption = False,
    *,
    out: Out,
) -> None:
    """Turn a checkout into a series, a patch a commit.

    Example: dgxlab patch export mine --tree ~/llama.cpp -m "cuda : larger tile"
    """
    from dgxlab import series

    root = project.root()
    at, cache = _pin(root, pin, source, out, trust_source)
    done = series.export(root, name, cache, at, tree, message)
    patches = [patch.name for patch in done.series.patches]
    out.result({"series": done.series.ref.name, "patches": patches}, "\n".join(f"patches/{name}/{p}" for p in patches))


def _pin(root: Path, pin: str | None, sources: list[str] | None, out: Out, trust_source: bool) -> tuple[str, PinCache]:
    """Return the pin asked for, or the one that the project's specs agree on, and a cache that has it."""
    from dgxlab.source import PinCache, default_path

    specs = []
    for path in [] if pin and sources else chain.from_iterable(project.specs(root).values()):
        try:
            specs.append(experiment(str(path)))
        except SpecError as error:  # it may be being edited
            out.note(f"left out: {error.message}")
    named = sorted({spec.pin for spec in specs})
    if pin is None and len(named) != 1:
        which = f"; say which with --pin: {', '.join(named)}" if named else "; say which with --pin"
        mend = f"{typed()} --pin {named[0]}" if named else f"ls -R {shlex.quote(str(root / 'experiments'))}"
        raise SpecError(f"the specs in {root / 'experiments'} name {len(named)} pins{which}", next=mend)
    at = pin or named[0]
    known = [s for spec in specs if spec.pin == at or pin for s in spec.sources]
    cache = PinCache(default_path(), trusted=trust_source)
    cache.ensure(at, sources or list(dict.fromkeys(known)), lambda note: None if "%" in note else out.note(note))
    return at, cache
