"""Classes that declare a tool, and code that several tools share to turn a bench entry into launches."""

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

_DOWNLOADS = (
    *("-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "--offline"),
    *("-mu", "--model-url", "-dr", "--docker-repo"),
)
_STOPS = ("-h", "--help", "--usage", "--version", "-cl", "--cache-list", "--list-devices", "--completion-bash")

ON_DEVICE = ("-ngl", "99", "-fit", "off")
"""Arguments that put all layers on the GPU. By default the tools decide that by the free memory."""


# -- keys of specs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """A key of a bench entry or gate in a spec."""

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
    """Return a dataclass field that is also a key of specs; `kind`, `about` and `flags` are those of `Key`.

    Args:
        default: In records and specs. A key without one is required in both.
        must: Required in specs although it has a default, which older records rely on.
        later: Give the field the metadata LATER.
    """
    metadata = {"key": Key(kind, about, flags, default, must or default is MISSING), **(LATER if later else {})}
    if isinstance(default, (list, dict)):
        return field(default_factory=tuple if isinstance(default, list) else dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def keys_of(record: Any) -> dict[str, Key]:
    """Return the `Key` of each field of a record, or of its class, that has one."""
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
"""Settings that several tools can vary, by llama.cpp's name for the column or parameter."""


# -- what a tool declares ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """One process to start, and the cells that it measures."""

    tool: str  # Bench.name
    cells: tuple[Cell, ...]
    argv: tuple[str, ...]
    model: str
    env: Mapping[str, str]
    limit_s: float


@dataclass(frozen=True, kw_only=True)
class Benchmark(Bench):
    """Base of all kinds of bench entries. Fields with a `key` are keys of a spec; editors show a kind's docstring."""

    axis_keys: ClassVar[Mapping[str, Key]] = {}
    """Settings that an entry may vary, by llama.cpp's name for the column. A launch has one value of each."""
    owned: ClassVar[tuple[str, ...]] = ()  # flags that dgxlab sets itself
    either: ClassVar[tuple[str, ...]] = ()  # keys of sizes of which a cell has one; all other keys and axes multiply
    rounds: ClassVar[int] = 1  # how often a launch measures each cell; only the last counts
    attempts: ClassVar[int] = 1  # how often a run may be launched when it ends well with rows missing
    apart: ClassVar[bool] = False  # whether the cells of a launch that have a number count when others have none
    vocabulary: ClassVar[bool] = False  # whether its model needs one
    pins: ClassVar[bool] = True  # whether its number of threads says how many processors it needs
    form: ClassVar[str]  # the report's `--form` that shows its results
    one_device: ClassVar[bool] = False
    """Whether a cell uses only the device named by its parameter `backend_name`; else it may use all devices."""

    def launches(self, env: Mapping[str, str], keep: Keep) -> Iterator[Launch]:
        """Yield the launches of this entry in `env`, each with those of its cells that `keep` selects, perhaps none."""
        raise NotImplementedError

    def flaws(self) -> Iterator[str]:
        """Yield why the entry's keys do not fit together."""
        yield from ()

    @staticmethod
    def parse(stdout: str, cells: Sequence[Cell]) -> Parsed:
        """Parse the output of one launch of these cells."""
        raise NotImplementedError

    @classmethod
    def files(cls, root: str) -> dict[str, str]:
        """Return the texts of the project `root` that a launch needs, by path; raises SpecError if one is missing."""
        return {}

    @staticmethod
    def exported(raw: dict[str, Any], samples: Samples) -> dict[str, Any]:
        """Return a recorded row with its metrics replaced by the means of `samples`, in the form of the tool."""
        return {**raw, **{name: math.fsum(values) / len(values) for name, values in samples.items()}}

    @staticmethod
    def printed(raw: str) -> str:
        """Return the text that the tool printed for a row; `raw` is the row's JSON in the record."""
        return raw

    @classmethod
    def refused(cls, args: Sequence[str]) -> dict[int, str]:
        """Return the reason for each word of an entry's `args` that is not allowed, by its index."""
        reasons = dict.fromkeys(cls.owned, "is set by dgxlab, which reads the tool's output")
        reasons |= dict.fromkeys(_DOWNLOADS, "would measure another model: name it under models")
        reasons |= dict.fromkeys(_STOPS, "measures nothing")
        for name, each in {**keys_of(cls), **cls.axis_keys}.items():
            reasons |= dict.fromkeys(each.flags, f"has a key of its own: {name}")
        flags = {place: arg.split("=")[0] for place, arg in enumerate(args) if arg.startswith("-")}
        # llama.cpp takes `--a_b` for `--a-b`
        spelled = {place: flag.replace("_", "-") if flag.startswith("--") else flag for place, flag in flags.items()}
        return {place: reasons[flag] for place, flag in spelled.items() if flag in reasons}


@dataclass(frozen=True)
class Tool:
    """What dgxlab knows of one program; a module of this package declares it as its TOOL."""

    program: str
    bench: type[Benchmark] | None = None
    check: type[Check] | None = None
    formats: Mapping[str, Format] = field(default_factory=dict)  # the formats of its output that can be imported
    built: bool = True  # whether it is a target of llama.cpp's build
    runs: str = ""  # the target that it runs, where that is another program
    drive: Callable[..., None] | None = None
    """Runs on the host in place of the program, with the words of a launch after {agent} drive PROGRAM."""


# -- from an entry to launches ----------------------------------------------------------------------------------------


def settings(axes: Mapping[str, Sequence[Param]]) -> Iterator[dict[str, Param]]:
    """Yield every combination of one value for each axis."""
    return (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def excluded(combination: Mapping[str, Param], exclude: Sequence[Mapping[str, Param]]) -> bool:
    """Return whether a combination has all the values of one of the `exclude` rules."""
    return any(all(combination.get(k) == v for k, v in rule.items()) for rule in exclude)


def launch_on_model(
    program: str, entry: Any, env: Mapping[str, str], cells: Iterable[Cell], flags: Iterable[str]
) -> Launch:
    """Return the launch of a program with these flags on the model of a bench entry; `env` is the entry's."""
    argv = (f"{{bin}}/{program}", "-m", f"{{model:{entry.model}}}", *flags)
    return Launch(entry.name, tuple(cells), argv, entry.model, env, entry.limit_s)


def room(tokens: int) -> int:
    """Return the context that llama.cpp gives a sequence of so many tokens: it rounds up."""
    return -(-tokens // 256) * 256


def flags_of(setting: Mapping[str, Param], axes: Mapping[str, Key]) -> list[str]:
    """Return the command-line arguments for one value of each axis."""
    return [word for name, value in setting.items() for word in (axes[name].flags[0], text_of(value))]


def varying(setting: Mapping[str, Param], axes: Mapping[str, Sequence[Param]]) -> str:
    """Return the end of a cell's label: ` name=value` for each setting whose axis has several values."""
    return "".join(f" {k}={text_of(v)}" for k, v in setting.items() if len(axes.get(k, ())) > 1)


def text_of(value: Param) -> str:
    """Return a value as a command-line argument: true as `1`."""
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
    """A gate that runs a program on a model, in the arm's environment and, with `against`, in another."""

    model: str = key("Name", "A name under models; it needs a vocabulary.")
    _: KW_ONLY
    n_ubatch: int = key("Count", "Tokens computed at once (physical batch size).", 512)
    against: Mapping[str, str | None] = key(
        "Against",
        "Variables that differ in the environment that the arm is compared with; null for one that is not set there.",
        {},
    )
    engaged: str = key(
        "Line",
        "Text that the path under test prints: must be on stderr of the arm, and not with the variables of against.",
        "",
        later=True,
    )
    seed: int = key("Whole", "Seed of the words.", 0)

    def limits(self) -> tuple[str, ...]:
        """Return the limit that `engaged` sets."""
        return (f"{self.engaged!r} on stderr",) if self.engaged else ()

    def in_both(self, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[CheckCommand, ...]:
        """Return an ARM command and, if the gate has `against`, an AGAINST command; `env` is the experiment's."""
        arm, other = environments(self, env)
        command = CheckCommand(ARM, argv, arm, self.model)
        return (command, CheckCommand(AGAINST, argv, other, self.model)) if self.against else (command,)

    def judge(self, readings: Readings) -> Iterator[Reason]:
        """Yield a reason if `engaged` is missing on the arm's stderr, or is on that of the AGAINST command."""
        if self.engaged and not readings[ARM]["engaged"]:
            yield reason(Code.ARM_NOT_ENGAGED, marker=self.engaged, where=WHERE[ARM])
        if self.engaged and self.against and readings[AGAINST]["engaged"]:
            yield reason(Code.BOTH_ENGAGED, marker=self.engaged, where=WHERE[AGAINST])
