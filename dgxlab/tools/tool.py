"""What a tool declares of itself, and what the tools share in turning an entry of a spec into launches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dgxlab.model import AGAINST, ARM, REFERENCE, Cell, CheckCommand, Param, environments
from dgxlab.tools.reading import Format
from dgxlab.tools.rows import Parsed

Samples = Mapping[str, Sequence[float]]
"""The samples of a row that count, by metric."""

Keep = Callable[[str, Cell], bool]
"""(model name, cell) -> whether it must be measured, of one entry."""

Readings = Mapping[str, Mapping[str, Any]]
"""By role: what a command of a gate printed, or under `problem` why that is nothing."""

DOWNLOADS = (
    *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "--offline"),
    *("-mu", "--model-url", "-dr", "--docker-repo"),
)
STOPS = ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices", "--completion-bash")

ON_DEVICE = ("-ngl", "99", "-fit", "off")
"""All layers on the GPU: what the tools choose by themselves depends on how much of its memory is free."""


@dataclass(frozen=True)
class Key:
    """A key of a spec's entry or gate.

    Attributes:
        kind: The type of its value, in the words of `spec.fields`; of an axis the type of one value.
        about: What editors show of it.
        flags: Every spelling of its flag; a launch uses the first.
        default: None for a key that must be there, "" for one without a default that may be left out.
    """

    kind: str
    about: str
    flags: tuple[str, ...] = ()
    default: Any = None


@dataclass(frozen=True)
class Launch:
    """One process to start and the cells it must give; `tool` is the name of its bench."""

    tool: str
    cells: tuple[Cell, ...]
    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str]
    limit_s: float


@dataclass(frozen=True)
class Benchmark:
    """What a tool measures.

    Attributes:
        name: Its key in specs, and its name in the record.
        about: What editors show of it.
        entry: The record of an entry; its fields are `keys`, and `axes` by name.
        keys: What an entry says besides its axes and what all entries have.
        axes: Settings of the tool by the name of llama.cpp's column or parameter, none of which must be there; each
            value is a launch of its own.
        owned: Flags that dgxlab sets itself.
        either: Keys of sizes of which a cell has one; all other keys and axes multiply.
        launches: Expands an entry, given its environment and what must be measured. A launch may have no cell left.
        parse: Reads the values of cells from standard output.
        compared: The metrics that get a verdict, each with the parameter of a cell that must not be 0, or "". Other
            metrics are the same runs in other words.
        exported: Turns a recorded row into what the tool would print of the samples that count.
        printed: Turns a recorded row into the text that the tool printed.
        rounds: How often a launch measures each cell; only the last counts.
        attempts: How often a run may be launched when it ends well with rows missing.
        one_device: Whether a cell computes on the device that its `backend_name` says; a model may be spread over all.
    """

    name: str
    about: str
    entry: type[Any]
    keys: Mapping[str, Key]
    launches: Callable[[Any, Mapping[str, str], Keep], Iterator[Launch]]
    parse: Callable[[str, Sequence[Cell]], Parsed]
    compared: Mapping[str, str]
    exported: Callable[[dict[str, Any], Samples], dict[str, Any]]
    axes: Mapping[str, Key] = field(default_factory=dict)
    owned: tuple[str, ...] = ()
    either: tuple[str, ...] = ()
    printed: Callable[[str], str] = str
    rounds: int = 1
    attempts: int = 1
    one_device: bool = False

    def refused(self, args: Sequence[str]) -> dict[int, str]:
        """Return why raw arguments of an entry are refused, by their place; empty when all are fine.

        llama.cpp reads `--batch_size` as `--batch-size`.
        """
        reasons = dict.fromkeys(self.owned, "is set by dgxlab, which reads the tool's output")
        reasons |= dict.fromkeys(DOWNLOADS, "would measure another model: name it under models")
        reasons |= dict.fromkeys(STOPS, "measures nothing")
        for name, key in {**self.keys, **self.axes}.items():
            reasons |= dict.fromkeys(key.flags, f"has a key of its own: {name}")
        flags = {place: arg.split("=")[0] for place, arg in enumerate(args) if arg.startswith("-")}
        spelled = {place: flag.replace("_", "-") if flag.startswith("--") else flag for place, flag in flags.items()}
        return {place: reasons[flag] for place, flag in spelled.items() if flag in reasons}


@dataclass(frozen=True)
class Checker:
    """What a gate does with a tool.

    Attributes:
        gate: The record of the gate; its `name` is the gate's key in specs.
        about: What editors show of it.
        keys: What a spec says of the gate, besides its environment and longest time.
        flaws: Yields why a gate could only pass, or never.
        step: Returns `commands` and, where the gate needs them, `text` or `files` of its CheckStep, given the gate,
            the experiment's environment and the project's folder.
        read: Returns what a command printed, given the gate, the command's role, stdout and stderr.
        judge: Yields why the gate did not pass, given the readings of all its commands.
        shown: Yields what was read, in words.
        sources: Returns what the gate compiles, by the name under which it is recorded, given the texts of its files.
        told_on: The stream on which a program that ran says what did not pass.
    """

    gate: type[Any]
    about: str
    keys: Mapping[str, Key]
    flaws: Callable[[Any], Iterator[str]]
    step: Callable[[Any, Mapping[str, str], str], dict[str, Any]]
    read: Callable[[Any, str, bytes, str], dict[str, Any]]
    judge: Callable[[Any, Readings], Iterator[str]]
    shown: Callable[[Any, Readings], Iterable[str]]
    sources: Callable[[Any, Mapping[str, str]], dict[str, str]] = lambda gate, files: {}
    told_on: str = "stdout"


@dataclass(frozen=True)
class Tool:
    """All that is known of one program.

    Attributes:
        built: Whether it is a target of llama.cpp's build.
        formats: The formats of its output that can be imported.
    """

    program: str
    bench: Benchmark | None = None
    check: Checker | None = None
    formats: Mapping[str, Format] = field(default_factory=dict)
    built: bool = True


# -- keys that several tools have -------------------------------------------------------------------------------------

MODEL = Key("Name", "A name under models.", ("-m", "--model"))
AXES = {
    "n_batch": Key("Count", "Logical batch size, in tokens.", ("-b", "--batch-size")),
    "n_ubatch": Key("Count", "Physical batch size, in tokens.", ("-ub", "--ubatch-size")),
    "type_k": Key("KvType", "Type of the K cache.", ("-ctk", "--cache-type-k")),
    "type_v": Key("KvType", "Type of the V cache.", ("-ctv", "--cache-type-v")),
    "n_threads": Key("Count", "CPU threads.", ("-t", "--threads")),
    "n_gpu_layers": Key(
        "Layers", "Layers on the GPU; -1 is the tool's own choice.", ("-ngl", "--n-gpu-layers", "--gpu-layers")
    ),
    "split_mode": Key("SplitMode", "How several GPUs share the model.", ("-sm", "--split-mode")),
    "main_gpu": Key("Whole", "The GPU that split_mode none uses.", ("-mg", "--main-gpu")),
    "flash_attn": Key("FlashAttn", 'FlashAttention: true, false or "auto".', ("-fa", "--flash-attn")),
}


GATE_ON_MODEL = {
    "model": Key("Name", "A name under models; it needs a vocabulary."),
    "n_ubatch": Key("Count", "Tokens computed at once (physical batch size).", default=512),
    "against": Key(
        "Against",
        "Environment that the arm is held against: variables with another value, null for one that is not set there.",
        default={},
    ),
    "engaged": Key(
        "Line",
        "What must be on the arm's stderr and not on that of against, because the path under test prints it.",
        default="",
    ),
    "seed": Key("Whole", "Seed of the words.", default=0),
}


# -- from an entry to launches ----------------------------------------------------------------------------------------


def settings(axes: Mapping[str, Sequence[Param]]) -> Iterator[dict[str, Param]]:
    """Yield every combination of the values of some axes."""
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def excluded(combination: Mapping[str, Param], exclude: Sequence[Mapping[str, Param]]) -> bool:
    """Return whether a combination has all the values of a rule."""
    return any(all(combination.get(k) == v for k, v in rule.items()) for rule in exclude)


def launch_on_model(
    tool: str, program: str, entry: Any, env: Mapping[str, str], cells: Iterable[Cell], flags: Iterable[str]
) -> Launch:
    """Return the launch of a program on an entry's model, with the entry's further arguments."""
    argv = (f"{{bin}}/{program}", "-m", f"{{model:{entry.model}}}", *flags)
    return Launch(tool, tuple(cells), argv, entry.model, env, entry.limit_s)


def flags_of(setting: Mapping[str, Param], axes: Mapping[str, Key]) -> list[str]:
    """Return the arguments for a setting."""
    return [word for name, value in setting.items() for word in (axes[name].flags[0], text_of(value))]


def varying(setting: Mapping[str, Param], axes: Mapping[str, Sequence[Param]]) -> str:
    """Return the part of a cell's label that names the settings of which an entry has several."""
    return "".join(f" {k}={text_of(v)}" for k, v in setting.items() if len(axes.get(k, ())) > 1)


def text_of(value: Param) -> str:
    """Return a value as an argument."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def comma(values: Iterable[object]) -> str:
    """Return values as one argument."""
    return ",".join(map(str, values))


# -- gates on a model -------------------------------------------------------------------------------------------------

WHERE = {ARM: "the arm", AGAINST: "the environment of against", REFERENCE: "the reference"}


def in_both(gate: Any, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[CheckCommand, ...]:
    """Return a command in the arm's environment and, where the gate has one, in the other."""
    arm, other = environments(gate, env)
    command = CheckCommand(ARM, argv, arm, gate.model)
    return (command, CheckCommand(AGAINST, argv, other, gate.model)) if gate.against else (command,)


def engaged(gate: Any, readings: Readings) -> Iterator[str]:
    """Yield where the path under test ran, or did not, other than the gate says."""
    if not gate.engaged:
        return
    if not readings[ARM]["engaged"]:
        yield f"the path under test did not run: {gate.engaged!r} is not on the stderr of {WHERE[ARM]}"
    if gate.against and readings[AGAINST]["engaged"]:
        yield f"the path under test ran on both sides: {gate.engaged!r} is on the stderr of {WHERE[AGAINST]} too"
