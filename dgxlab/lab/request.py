"""A request: what a command is asked to measure, and the sources that it builds."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from dgxlab import compare, model, plan, quantise, series
from dgxlab.errors import SpecError, edit
from dgxlab.lab import Side, Watch, noted
from dgxlab.model import Experiment, FileModel, ParityGate, Source, events
from dgxlab.source import PinCache
from dgxlab.tools.backend_ops import BackendOpsBench

OF_TREE = "-tree-"
"""In the name of an experiment that is built from a checkout, what comes before the first digits of its tree."""
_DIGITS, _NAMED = 8, 50  # characters of the tree, and most of the experiment's own name: together they are a NAME
_QUOTED, _CMAKE = '"[A-Z][A-Z0-9_]*"', "(GGML|LLAMA)_[A-Z0-9_]+"
"""Regexes, for git grep, of names in C, as those of operations and types, and of llama.cpp's variables of cmake."""
_OPERATIONS = (_QUOTED, "*.c", "tests/*.cpp")
_CMAKE_FILES = ("*CMakeLists.txt", "*.cmake")
_OPTION = rf"option *\( *{_CMAKE}"
"""Regex of what declares a boolean to cmake, which takes any other text for true: GGML_NATIVE=flase builds natively."""
_BOOLEAN = re.compile("ON|OFF|YES|NO|TRUE|FALSE|Y|N|[01]", re.IGNORECASE)


class UnknownName(SpecError):
    """The llama.cpp that would be built does not have a name in the spec, or not with that value; another one may."""


@dataclass(frozen=True)
class Request:
    """What a command is asked to measure."""

    kind: str  # run, gate (the gates alone), ab, noise (an A/A session) or screen (one bracket instead of a chain)
    experiment: Experiment
    baseline: Experiment | None = None  # the baseline of an A/B session; the experiment itself for an A/A session
    again: bool = False  # measure everything, up to date or not. A session always does
    tree: Path | Source | None = None
    """A llama.cpp checkout to build instead of the experiment's series, or one as it was; see `sourced`."""
    baseline_tree: Path | Source | None = None  # the same for the baseline
    allow: Collection[str] = ()  # kinds of `compare.MUST_AGREE` in which the arms may differ
    wait_s: float = model.WAIT_S  # max wait of the job for its devices, 0 for none
    max_s: float = 0.0  # max time of a session's chains, 0 for no limit
    cells: Collection[str] = ()  # labels of the cells that a session compares, () for all
    behind: bool = False  # begin when no other job runs or waits on the host: a loop lets people go first
    level: float = 0.0  # of a ledger, for which a chain is long enough; 0 for that of a session
    check: Callable[[model.Plan], None] | None = None  # raises if the session of this plan would decide nothing
    begun: Callable[[str], None] | None = None  # as in `jobs.start`

    @property
    def experiments(self) -> list[Experiment]:
        """The experiments, the baseline first; only one if both are equal."""
        both = [self.baseline] if self.baseline and self.baseline.digest != self.experiment.digest else []
        return [*both, self.experiment]

    def at(self, host: str) -> Request:
        """Return the request for another host."""
        baseline = self.baseline and replace(self.baseline, host=host)
        return replace(self, experiment=replace(self.experiment, host=host), baseline=baseline)

    @property
    def name(self) -> str:
        """The name of the job, which job ids begin with."""
        return plan.session_name(self.baseline, self.experiment) if self.baseline else self.experiment.name

    @property
    def subject(self) -> str:
        """The subject of the job, as in `Plan.subject`."""
        return model.subject(self.kind, self.experiment.digest, self.baseline.digest if self.baseline else "")


def compared(request: Request) -> list[str]:
    """Return the differences between the arms, a line each; refuses those that are not allowed."""
    baseline, candidate = request.baseline, request.experiment
    if baseline is None:
        return []
    differing = compare.differences(baseline, candidate)
    compare.refuse(differing, request.allow, candidate.path)
    both = f"{candidate.name} against {baseline.name}"
    if differing:
        return [f"{both}, which differ in", *(f"  {each}" for each in differing)]
    if candidate.digest == baseline.digest:
        return [f"{both}: nothing differs, an A/A session"]
    return [f"{both}: their specs differ in nothing but the name"]


def sourced(cache: PinCache, request: Request, watch: Watch) -> tuple[Request, list[Side]]:
    """Make the sources of a request, and return it with its sides, the baseline first; one side if both are equal.

    An experiment that is built from a checkout becomes another one, named after the tree: its results never count for
    the experiment itself, nor for another state of the checkout. Raises as `source_of`, and UnknownName.
    """
    arms = ((request.baseline, request.baseline_tree), (request.experiment, request.tree))
    asked = {(each.digest, tree): (each, tree) for each, tree in arms if each}
    sides = [_side(cache, *each, watch) for each in asked.values()]
    baseline = sides[0].experiment if request.baseline else None
    return replace(request, baseline=baseline, experiment=sides[-1].experiment), sides


def _side(cache: PinCache, experiment: Experiment, tree: Path | Source | None, watch: Watch) -> Side:
    source = source_of(cache, experiment, tree, watch)
    if not isinstance(tree, Source):  # a try has one, and its gates judge what it lacks
        _check_names(cache, experiment, source, watch)
    if tree is None:
        return Side(experiment, source)
    name = f"{experiment.name[:_NAMED]}{OF_TREE}{source.tree[:_DIGITS]}"
    diff = series.diff(cache, source)
    what = f"{tree}, " if isinstance(tree, Path) else ""
    changed = f"{series.changed_lines(diff)} changed lines since pin {source.pin[:12]}"
    noted(watch)(f"{name} is {what}tree {source.tree[:12]}: {changed}")
    kernels = _copies(cache, experiment, source)
    named = replace(experiment, name=name, hypothesis="", series=(), kernels=kernels)
    return Side(named, source, diff)


def _check_names(cache: PinCache, experiment: Experiment, source: Source, watch: Watch) -> None:
    """Raise UnknownName for an operation or a type that a source does not have, and for a misspelt boolean of cmake.

    Of an unknown option of cmake a note tells: an older pin may have fewer, and cmake ignores what it does not know. A
    source in which no such names are found at all is not checked.
    """
    from dgxlab.spec.nodes import nearest, shown  # imported late: half the time of a short command

    def unknown(what: str, names: Collection[str], *where: str) -> list[str]:
        known = _words(cache, source.tree, *where) if names else set()
        here = f"{experiment.name}: llama.cpp {source.pin[:12]} has no {what}"
        return [f"{here} {name}{nearest(name, known)}" for name in names if known and name not in known]

    entries = (*experiment.gates, *experiment.bench, *experiment.holdout)
    ops = [each.op for each in entries if isinstance(each, ParityGate | BackendOpsBench)]
    recipes = [recipe for recipe in experiment.models.values() if not isinstance(recipe, FileModel)]
    quants = sorted({model.quantisation(recipe).quant for recipe in recipes} - {quantise.NVFP4})
    wrong = unknown("operation", ops, *_OPERATIONS) + unknown("type", quants, _QUOTED, "*/quantize.cpp")
    if texts := {name: value for name, value in experiment.cmake.items() if not _BOOLEAN.fullmatch(value)}:
        booleans = {word.rpartition("(")[2] for word in _words(cache, source.tree, _OPTION, *_CMAKE_FILES)}
        must = f"{experiment.name}: cmake.{{}} must be true or false, not {{}}"
        wrong += [must.format(name, shown(value)) for name, value in texts.items() if name in booleans]
    if wrong:
        raise UnknownName(wrong[0], next=edit(experiment.path), details="\n".join(wrong))
    options = [name for name in experiment.cmake if re.match("GGML_|LLAMA_", name)]
    for sentence in unknown("cmake option", options, _CMAKE, *_CMAKE_FILES):
        noted(watch)(sentence)


def operations(cache: PinCache, tree: str) -> set[str]:
    """Return the names in the C sources of a tree, among which are those of all operations that have tests."""
    return _words(cache, tree, *_OPERATIONS)


def _words(cache: PinCache, tree: str, regex: str, *paths: str) -> set[str]:
    """Return what matches in files of a tree, without quotes."""
    found = cache.git.attempt("grep", "-h", "--only-matching", "-E", regex, tree, "--", *paths)
    return set(found.text.replace('"', "").split())


def _copies(cache: PinCache, experiment: Experiment, source: Source) -> dict[str, str]:
    """Return the files of kernels/ that the experiment's series copy into a tree, as that tree has them."""
    own = [series.read(Path(experiment.root), name, experiment.pin) for name in experiment.series]
    overlays = {overlay.dest: overlay.source for each in own for overlay in each.overlays}
    present = cache.git.run("ls-tree", "-r", "--name-only", source.tree, "--", *overlays) if overlays else ""
    blobs = {dest: cache.git.read("cat-file", "blob", f"{source.tree}:{dest}") for dest in present.splitlines()}
    return {overlays[dest].removeprefix("kernels/"): blob.decode(errors="replace") for dest, blob in blobs.items()}


def source_of(cache: PinCache, experiment: Experiment, tree: Path | Source | None, watch: Watch) -> Source:
    """Return the source of an experiment, made in the pin cache: its pin with its series, or the checkout `tree`.

    A `Source` is in the cache already, and returned.

    Raises SpecError if no source has the pin, and PatchError if the series does not apply to the pin.
    """
    if isinstance(tree, Source):
        return tree

    def tell(note: str) -> None:  # git's percentages move the bar
        progress = events.ProgressEvent(id="pin", done=0, total=0, note=note)
        watch(progress if "%" in note else events.NoteEvent(note=note))

    cache.ensure(experiment.pin, experiment.sources, tell)
    if tree is not None:
        return series.apply_tree(cache, experiment.pin, tree)
    root = Path(experiment.root)
    return series.apply(cache, experiment.pin, [series.read(root, name, experiment.pin) for name in experiment.series])
