"""dgxlab patch: series on a pin."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dgxlab import project
from dgxlab.cli import _complete
from dgxlab.cli._app import App, TrustSourceOption, readable_experiments
from dgxlab.cli._out import Out, plural, typed
from dgxlab.errors import CheckFailed, SpecError, UsageError, command

if TYPE_CHECKING:
    from dgxlab.source import PinCache

app = App("List, check, refresh and export patch series.")

_NameArgument = Annotated[str, Argument(help="The series: a folder under patches/.", autocompletion=_complete.series)]


@dataclass(frozen=True)
class _PinOptions:
    """Options of commands that need a pin."""

    pin: Annotated[
        str | None, Option("--pin", help="A llama.cpp commit; by default the one that this project's specs name.")
    ] = None
    source: Annotated[
        list[str] | None, Option("--source", help="Where to find the pin; by default where the specs say.")
    ] = None
    trust_source: TrustSourceOption = False

    def fetch(self, out: Out) -> tuple[Path, PinCache, str]:
        """Fetch the requested pin, else the one that all specs name; return the project, the pin cache and the pin."""
        from dgxlab.source import PinCache

        root = project.root()
        specs = [] if self.pin and self.source else readable_experiments(out.note)
        named = sorted({spec.pin for spec in specs})
        if self.pin is None and len(named) != 1:
            which = f"; say which with --pin: {', '.join(named)}" if named else "; say which with --pin"
            look = project.or_init(command("ls", "-R", root / "experiments"))
            mend = f"{typed()} --pin {named[0]}" if named else look
            raise SpecError(f"the specs in {root / 'experiments'} name {len(named)} pins{which}", next=mend)
        at = self.pin or named[0]
        known = [source for spec in specs if spec.pin == at or self.pin for source in spec.sources]
        cache = PinCache(trusted=self.trust_source)
        cache.ensure(
            at, self.source or list(dict.fromkeys(known)), lambda note: None if "%" in note else out.note(note)
        )
        return root, cache, at


@app.add
def list_(*, out: Out) -> None:
    """List the series of this project with their digests.

    Example: dgxlab patch list
    """
    from dgxlab import series

    rows, lines = [], []
    root = project.root()
    for each in (series.read(root, name) for name in series.names(root)):
        patches = [patch.name for patch in each.patches]
        overlays = [f"{overlay.source} -> {overlay.dest}" for overlay in each.overlays]
        rows.append({"name": each.name, "digest": each.digest, "patches": patches, "overlays": overlays})
        lines += [f"{each.name}@{each.digest[:12]}", *(f"  {line}" for line in (*patches, *overlays))]
    out.result(rows, "\n".join(lines) or "no series")


@app.add
def check(
    names: list[str] | None = Argument(None, help="Series to check; all by default.", autocompletion=_complete.series),
    *,
    options: _PinOptions,
    out: Out,
) -> None:
    """Check that series are complete and apply to a pin exactly.

    Example: dgxlab patch check
    """
    from dgxlab import series

    root = project.root()
    known = series.names(root)
    if unknown := [name for name in names or () if name not in known]:
        raise UsageError(f"{root / 'patches'} has no series {unknown[0]!r}", next="dgxlab patch list")
    _, cache, at = options.fetch(out)
    problems = {name: series.check(root, name, cache, at) for name in names or known}
    lines = []
    for name, listed in problems.items():
        lines += [f"{name}: {plural(len(listed), 'problem')}", *(f"  {problem}" for problem in listed)]
    out.result({"pin": at, "problems": problems}, "\n".join([f"pin {at[:12]}", *(lines or ["no series"])]))
    if bad := [name for name, listed in problems.items() if listed]:
        mend = f"dgxlab patch refresh {bad[0]} --pin {at}"
        raise CheckFailed(f"not every series applies to pin {at[:12]}", next=mend)


@app.add
def refresh(name: _NameArgument, *, options: _PinOptions, out: Out) -> None:
    """Port a series to a pin by three-way merges, and rewrite it.

    Example: dgxlab patch refresh backend-ops-shapes
    """
    from dgxlab import series

    root, cache, at = options.fetch(out)
    changed = series.refresh(root, name, cache, at)
    out.result({"pin": at, "changed": changed}, "\n".join(f"wrote {name}" for name in changed) or "nothing to change")


@app.add
def export(
    name: _NameArgument,
    tree: Path = Option(..., help="A llama.cpp checkout on the pin."),
    message: str = Option("", "--message", "-m", help="Commit message for what is not committed."),
    *,
    options: _PinOptions,
    out: Out,
) -> None:
    """Turn a checkout into a series, a patch a commit.

    Example: dgxlab patch export mine --tree ~/llama.cpp -m "cuda : larger tile"
    """
    from dgxlab import series

    root, cache, at = options.fetch(out)
    patches = [patch.name for patch in series.export(root, name, cache, at, tree, message).patches]
    out.result({"series": name, "patches": patches}, "\n".join(f"patches/{name}/{p}" for p in patches))
