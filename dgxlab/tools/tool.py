"""Declarations of a tool, and shared code that turns a spec's entry into launches."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from typing import Any, ClassVar

from dgxlab.model import (
    AGAINST,
    ARM,
    LATER,
    REFERENCE,
    SHORT,
    SHORT_REFERENCE,
    Bench,
    Cell,
    Check,
    CheckCommand,
    Param,
    Readings,
    environments,
)
from dgxlab.model.reasons import Code, Reason, reason
from dgxlab.tools.reading import Format
from dgxlab.tools.rows import Parsed

Samples = Mapping[str, Sequence[float]]  # the samples of a row that count, by metric
Keep = Callable[[str, Cell], bool]  # (model name, cell) -> whether it must be measured, of one entry

DOWNLOADS = (
    *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "--offline"),
    *("-mu", "--model-url", "-dr", "--docker-repo"),
)
STOPS = ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices", "--completion-bash")

ON_DEVICE = ("-ngl", "99", "-fit", "off")
"""All layers on the GPU: the tools' own choice would depend on the free memory."""


# -- keys of specs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of a spec's entry or gate."""

    kind: str  # the type of its value, in the words of `spec.fields`; of an axis the type of one value
    about: str  # its help in editors
    flags: tuple[str, ...] = ()  # every spelling of its flag; a launch uses the first
    default: Any = None  # None or "" for a key without one
    must: bool = False  # whether it must be there


def key(
    kind: str,
    about: str,
    default: Any = MISSING,
    *,
    flags: tuple[str, ...] = (),
    must: bool = False,
    later: bool = False,
) -> Any:
    """Return the field of a record that is a key of specs too.

    Args:
        must: A spec must have it; older records need not.
        later: See LATER.
    """
    metadata = {"key": Key(kind, about, flags, default, must or default is MISSING), **(LATER if later else {})}
    if isinstance(default, (list, dict)):
        return field(default_factory=tuple if isinstance(default, list) else dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys_of(record: Any) -> dict[str, Key]:
    """Return the keys of a record or its class, by name."""
    return {f.name: f.metadata["key"] for f in fields(record) if "key" in f.metadata}


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
"""Axes that several tools have, by the name of llama.cpp's column or parameter."""


# -- what a tool declares ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One process to start and the cells it must give; `tool` is the name of its bench."""

    tool: str
    cells: tuple[Cell, ...]
    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Benchmark(Bench):
    """An entry of a tool that measures. Its docstring is its help in editors, its fields with a `key` are keys."""

    axis_keys: ClassVar[Mapping[str, Key]] = {}
    """Settings that may be varied, by llama.cpp's name for the column; each value is a launch of its own."""
    owned: ClassVar[tuple[str, ...]] = ()  # flags that dgxlab sets itself
    either: ClassVar[tuple[str, ...]] = ()  # keys of sizes of which a cell has one; all other keys and axes multiply
    rounds: ClassVar[int] = 1  # how often a launch measures each cell; only the last counts
    attempts: ClassVar[int] = 1  # how often a run may be launched when it ends well with rows missing
    form: ClassVar[str]  # of its tables: ops, single-stream or concurrency
    one_device: ClassVar[bool] = False
    """Whether a cell computes on the device that its `backend_name` says; a model may be spread over all."""

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Expand the entry, given its environment and what must be measured; a launch may have no cell left."""
        raise NotImplementedError

    @staticmethod
    def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
        """Read the values of cells from standard output."""
        raise NotImplementedError

    @classmethod
    def files(cls, root: str) -> dict[str, str]:
        """Return texts of a project that the host needs for a launch, by path; raises SpecError if one is missing."""
        return {}

    @staticmethod
    def exported(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
        """Turn a recorded row into the tool's row for the samples that count, as a rule with their means."""
        return {**raw, **{name: math.fsum(values) / len(values) for name, values in samples.items()}}

    @staticmethod
    def printed(raw: str) -> str:
        """Turn a recorded row into the text that the tool printed."""
        return raw

    @classmethod
    def refused(cls, args: Sequence[str]) -> dict[int, str]:
        """Return why raw arguments of an entry are refused, by their place; llama.cpp reads `--a_b` as `--a-b`."""
        reasons = dict.fromkeys(cls.owned, "is set by dgxlab, which reads the tool's output")
        reasons |= dict.fromkeys(DOWNLOADS, "would measure another model: name it under models")
        reasons |= dict.fromkeys(STOPS, "measures nothing")
        for name, each in {**keys_of(cls), **cls.axis_keys}.items():
            reasons |= dict.fromkeys(each.flags, f"has a key of its own: {name}")
        flags = {place: arg.split("=")[0] for place, arg in enumerate(args) if arg.startswith("-")}
        spelled = {place: flag.replace("_", "-") if flag.startswith("--") else flag for place, flag in flags.items()}
        return {place: reasons[flag] for place, flag in spelled.items() if flag in reasons}


@dataclass(frozen=True)
class Tool:
    """The declaration of one program."""

    program: str
    bench: type[Benchmark] | None = None
    check: type[Check] | None = None
    formats: Mapping[str, Format] = field(default_factory=dict)  # the formats of its output that can be imported
    built: bool = True  # whether it is a target of llama.cpp's build
    runs: str = ""  # the target that it runs, where that is another program


# -- from an entry to launches ----------------------------------------------------------------------------------------


def settings(axes: Mapping[str, Sequence[Param]]) -> Iterator[dict[str, Param]]:
    """Yield every combination of the values of some axes."""
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def excluded(combination: Mapping[str, Param], exclude: Sequence[Mapping[str, Param]]) -> bool:
    """Return whether a combination has all the values of a rule."""
    return any(all(combination.get(k) == v for k, v in rule.items()) for rule in exclude)


def launch_on_model(
    program: str, entry: Any, env: Mapping[str, str], cells: Iterable[Cell], flags: Iterable[str]
) -> Launch:
    """Return the launch of a program on an entry's model."""
    argv = (f"{{bin}}/{program}", "-m", f"{{model:{entry.model}}}", *flags)
    return Launch(entry.name, tuple(cells), argv, entry.model, env, entry.limit_s)


def flags_of(setting: Mapping[str, Param], axes: Mapping[str, Key]) -> list[str]:
    """Return the arguments for a setting."""
    return [word for name, value in setting.items() for word in (axes[name].flags[0], text_of(value))]


def varying(setting: Mapping[str, Param], axes: Mapping[str, Sequence[Param]]) -> str:
    """Return the part of a cell's label that names the settings of which an entry has several."""
    return "".join(f" {k}={text_of(v)}" for k, v in setting.items() if len(axes.get(k, ())) > 1)


def text_of(value: Param) -> str:
    """Return a value as an argument."""
    return str(int(value)) if isinstance(value, bool) else str(value)


# -- gates on a model -------------------------------------------------------------------------------------------------

WHERE = {
    ARM: "the arm",
    AGAINST: "the environment of against",
    REFERENCE: "the reference",
    SHORT: "the shorter context",
    SHORT_REFERENCE: "the reference of the shorter context",
}


@dataclass(frozen=True)
class ModelGate(Check):
    """A gate that runs a program on a model, in the arm's environment and maybe in another."""

    model: str = key("Name", "A name under models; it needs a vocabulary.")
    _: KW_ONLY
    n_ubatch: int = key("Count", "Tokens computed at once (physical batch size).", 512)
    against: Mapping[str, str | None] = key(
        "Against",
        "Environment that the arm is held against: variables with another value, null for one that is not set there.",
        {},
    )
    engaged: str = key(
        "Line",
        "What must be on the arm's stderr and not on that of against, because the path under test prints it.",
        "",
        later=True,
    )
    seed: int = key("Whole", "Seed of the words.", 0)

    def in_both(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[CheckCommand, ...]:
        """Return a command in the arm's environment and, where the gate has one, in the other."""
        arm, other = environments(self, env)
        command = CheckCommand(ARM, argv, arm, self.model)
        return (command, CheckCommand(AGAINST, argv, other, self.model)) if self.against else (command,)

    def judge(self, readings: Readings) -> Iterator[Reason]:
        """Yield a reason if the path under test ran where it must not, or did not run where it must."""
        if self.engaged and not readings[ARM]["engaged"]:
            yield reason(Code.ARM_NOT_ENGAGED, marker=self.engaged, where=WHERE[ARM])
        if self.engaged and self.against and readings[AGAINST]["engaged"]:
            yield reason(Code.BOTH_ENGAGED, marker=self.engaged, where=WHERE[AGAINST])
