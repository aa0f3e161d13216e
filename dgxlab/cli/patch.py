"""dgxlab patch: series on a pin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from dgxlab import project
from dgxlab.cli import _complete
from dgxlab.cli._app import App, TrustSourceOption, readable_experiments
from dgxlab.cli._out import Out, plural, typed
from dgxlab.errors import CheckFailed, SpecError, command

if TYPE_CHECKING:
    from dgxlab.model import Experiment
    from dgxlab.source import PinCache

app = App("List, check, refresh and export patch series.")

_NameArgument = Annotated[str, Argument(help="The series: a folder under patches/.", autocompletion=_complete.series)]
_BesideOption = Annotated[
    bool, Option("--beside", help="Keep the patches for other pins: write to a folder of this pin in the series' own.")
]


@dataclass(frozen=True)
class _PinOptions:
    pin: Annotated[
        str | None,
        Option(
            "--pin",
            help="A llama.cpp commit; by default the one that this project's specs name; of several, the checkout's.",
        ),
    ] = None
    source: Annotated[
        list[str] | None, Option("--source", help="Where to find the pin; by default where the specs say.")
    ] = None
    trust_source: TrustSourceOption = False

    def fetch(self, out: Out, tree: Path | None = None) -> tuple[Path, PinCache, str]:
        """Fetch the requested pin, else the one that all specs name; return the project, the pin cache and the pin.

        Where specs name several pins, it is the newest that the checkout `tree` is based on.
        """
        from dgxlab import series

        root, specs = project.root(), self._specs(out)
        named = sorted({spec.pin for spec in specs})
        if tree and not self.pin and len(named) > 1:
            named = series.bases(tree, named) or named
        if self.pin is None and len(named) != 1:
            which = f"; say which with --pin: {', '.join(named)}" if named else "; say which with --pin"
            look = project.or_init(command("ls", "-R", root / "experiments"))
            mend = f"{typed()} --pin {named[0]}" if named else look
            raise SpecError(f"the specs in {root / 'experiments'} name {len(named)} pins{which}", next=mend)
        at = self.pin or named[0]
        return root, self._ensure(at, specs, out), at

    def fetch_each(self, names: Sequence[str], out: Out) -> tuple[PinCache, dict[str, list[str]]]:
        """Fetch the requested pin, else all that specs name; return the pin cache, and the series to check on each pin.

        Those are `names`, or all. Where specs name several pins, a series is checked on those that a spec applies it
        to, or that it has patches of its own for; one of `names` that has neither is checked on each.
        """
        from dgxlab import series

        root, specs = project.root(), self._specs(out)
        named = sorted({spec.pin for spec in specs})
        if self.pin or len(named) < 2:
            _, cache, at = self.fetch(out)
            return cache, {at: list(names or series.names(root))}
        wanted = list(names or series.names(root))
        used = {(spec.pin[:12], name.partition(":")[0]) for spec in specs for name in spec.series}
        used |= {(pin, name) for name in wanted for pin in series.own_pins(root, name)}
        pins = {at[:12]: at for at in named}
        if idle := set(wanted) - {name for pin, name in used if pin in pins}:
            how = f"checked on each of {len(named)} pins" if names else "left out"
            out.note(f"{how}, as no spec names them: {', '.join(sorted(idle))}")
        if names:
            used |= {(pin, name) for pin in pins for name in idle}
        for at in named:
            cache = self._ensure(at, specs, out)
        return cache, {at: [each for each in wanted if (pin, each) in used] for pin, at in pins.items()}

    def _specs(self, out: Out) -> Sequence[Experiment]:
        return [] if self.pin and self.source else readable_experiments(out.note)

    def _ensure(self, at: str, specs: Sequence[Experiment], out: Out) -> PinCache:
        from dgxlab.source import PinCache

        known = [source for spec in specs if spec.pin == at or self.pin for source in spec.sources]
        cache = PinCache(trusted=self.trust_source)
        cache.ensure(
            at, self.source or list(dict.fromkeys(known)), lambda note: None if "%" in note else out.note(note)
        )
        return cache


def known_series(root: Path, names: Sequence[str]) -> Sequence[str]:
    """Return `names`, or without any all series of a project; SpecError if one is unknown or has no patches."""
    from dgxlab import series

    known = series.names(root)
    if unknown := [name for name in names if name not in known]:
        raise series.unknown(root, unknown[0])
    return names or known


@app.add
def list_(*, out: Out) -> None:
    """List the series of this project with their digests.

    Example: dgxlab patch list
    """
    from dgxlab import series

    root = project.root()
    rows: list[dict[str, object]] = []
    lines: list[str] = []
    empty: dict[str, object] = {"digest": None, "patches": [], "overlays": [], "pins": {}, "problems": []}
    for name in series.names(root):
        try:
            each = series.read(root, name)
            pins = {pin: series.read(root, name, pin).digest for pin in series.own_pins(root, name)}
        except SpecError as error:
            problems = error.details.splitlines() or [error.message]
            rows.append({"name": name, **empty, "problems": problems})
            lines += [name, *(f"  {line}" for line in (*problems, error.next))]
            continue
        patches = [patch.name for patch in each.patches]
        overlays = [f"{overlay.source} -> {overlay.dest}" for overlay in each.overlays]
        rows.append(
            {**empty, "name": name, "digest": each.digest, "patches": patches, "overlays": overlays, "pins": pins}
        )
        others = [f"for pin {pin}: @{digest[:12]}" for pin, digest in pins.items()]
        lines += [f"{name}@{each.digest[:12]}", *(f"  {line}" for line in (*patches, *overlays, *others))]
    for name in series.begun(root):
        rows.append({"name": name, **empty})
        lines += [name, f"  no patches yet: {series.first_export(name)}"]
    out.result(rows, "\n".join(lines) or "no series")


@app.add
def check(
    names: list[str] | None = Argument(None, help="Series to check; all by default.", autocompletion=_complete.series),
    *,
    options: _PinOptions,
    out: Out,
) -> None:
    """Check that series are complete and apply to a pin exactly.

    Without --pin, a series is checked on each pin that a spec applies it to or that it has patches of its own for; if
    there is none and the series is named here, on each pin of the specs.

    Example: dgxlab patch check
    """
    from dgxlab import series

    root = project.root()
    known_series(root, names or ())
    if not names and (begun := series.begun(root)):
        out.note(f"left out, as they have no patches yet: {', '.join(begun)}")
    cache, each = options.fetch_each(names or (), out)
    rows, lines, mends = [], [], []
    applied = [name for wanted in each.values() for name in wanted]
    for at, wanted in each.items():
        problems = {name: series.check(root, name, cache, at, beside=applied.count(name) > 1) for name in wanted}
        rows.append({"pin": at, "problems": {name: list(listed) for name, listed in problems.items()}})
        lines += [f"pin {at[:12]}", *([] if wanted else ["no series"])]
        for name, listed in problems.items():
            lines += [f"{name}: {plural(len(listed), 'problem')}", *(f"  {problem}" for problem in listed)]
            mends += [(at, mend) for mend in listed.values()]
    out.result(rows, "\n".join(lines))
    if mends:
        (at, mend), *_ = mends
        raise CheckFailed(f"not every series applies to pin {at[:12]}", next=mend)


@app.add
def refresh(name: _NameArgument, beside: _BesideOption = False, *, options: _PinOptions, out: Out) -> None:
    """Port a series to a pin by three-way merges, and rewrite it.

    Example: dgxlab patch refresh backend-ops-shapes
    """
    from dgxlab import series

    root, cache, at = options.fetch(out)
    changed = series.refresh(root, name, cache, at, beside=beside)
    out.result({"pin": at, "changed": changed}, "\n".join(f"wrote {name}" for name in changed) or "nothing to change")


@app.add
def export(
    name: _NameArgument,
    tree: Path = Option(..., help="A llama.cpp checkout on the pin."),
    message: str = Option("", "--message", "-m", help="Commit message for what is not committed."),
    beside: _BesideOption = False,
    *,
    options: _PinOptions,
    out: Out,
) -> None:
    """Turn a checkout into a series, a patch a commit.

    Patches of the series whose commits the checkout lacks are removed, and named; git must have them.

    Example: dgxlab patch export mine --tree ~/llama.cpp -m "cuda : larger tile"
    """
    from dgxlab import series

    root, cache, at = options.fetch(out, tree)
    before = set((root / "patches" / name).rglob("*.patch"))
    patches = [patch.name for patch in series.export(root, name, cache, at, tree, message, beside=beside).patches]
    place = series.place_for(root, name, at)
    removed = sorted(str(path.relative_to(root)) for path in before if not path.exists())
    lines = [*(f"{place}/{patch}" for patch in patches), *(f"removed: {path}" for path in removed)]
    out.result({"series": name, "patches": patches, "removed": removed}, "\n".join(lines))
