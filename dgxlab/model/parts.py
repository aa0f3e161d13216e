"""Types of fields: texts and numbers with their limits, and the maps that stay JSON where the record keeps them."""

# ruff: noqa: UP013 - a map of few keys is a line

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypedDict, Union

from dgxlab.model.wire import Match, Within

Name = Annotated[str, Within(1, 1000)]
Count = Annotated[int, Within(0)]
Sample = Annotated[float, Within(1e-30)]  # a measured value: all of them are above 0
Seconds = Annotated[float, Within(0, 1e10)]
Time = Annotated[float, Within(0, 1e11)]  # Unix seconds, to the year 5138: later ones cannot be shown
Exit = Annotated[int, Within(0, 255)]
Digest = Annotated[str, Within(1, 128)]
Path = Annotated[str, Within(1, 4096)]
Texts = tuple[str, ...]
Variables = Mapping[Name, str]
Role = Annotated[str, Match("burn-in|baseline|candidate")]
MaybeText = Union[str, None]
MaybeCount = Union[Count, None]
Number = Union[float, None]

# a host's facts; None where unknown

Driver = TypedDict("Driver", {"version": MaybeText, "cuda": MaybeText})
Disk = TypedDict("Disk", {"path": str, "total_mib": Count, "free_mib": Count})
Process = TypedDict("Process", {"gpu_uuid": str, "pid": Count, "program": str, "user": str, "used_mib": MaybeCount})
Tools = TypedDict("Tools", {"git": str, "cmake": str, "ninja": str, "ccache": str, "nvcc": str})
_Gpu = TypedDict("_Gpu", {"name": MaybeText, "uuid": MaybeText})


class Gpu(_Gpu, total=False):
    """A GPU as nvidia-smi names it."""

    driver_version: MaybeText
    compute_cap: MaybeText


class Details(TypedDict, total=False):
    """Further facts of a host; older agents report fewer."""

    user: str
    kernel: str
    os: str
    glibc: Annotated[str, Match(r"([0-9]{1,4}(\.[0-9]{1,4})+)?")]
    python: str
    cpu: str
    cpus: Count
    memory_mib: Count
    mem_available_mib: Count
    disk: Disk
    gpus: list[Gpu]
    driver: Driver
    nvidia_devices: Count
    gpu_processes: list[Process]
    lock_folder: str
    versions: Mapping[str, str]
    tools: Tools


Graphics = TypedDict("Graphics", {"uuid": MaybeText})  # a GPU's state: nvidia-smi's fields as it printed them


class State(TypedDict, total=False):
    """The host's condition at one instant; older agents report less."""

    boot_id: str
    gpus: Union[list[Graphics], None]
    load_1min: Number
    mem_available_mib: Number
    swap_used_mib: Number
    swap_in_mib: Number
    oom_kills: Number
    cpu_mhz: Number
    cpu_temp_c: Number
    pinned: list[Count]  # the processors that the program was pinned to, before a run that was


# parsed output of a gate's commands

Launched = TypedDict("Launched", {"role": Name, "argv": list[str], "env": Variables, "rc": Union[int, None]})
Cases = TypedDict(  # of test-backend-ops; `cases` is the digest of their list
    "Cases", {"passed": MaybeCount, "total": MaybeCount, "unsupported": MaybeCount, "failed": Texts, "cases": MaybeText}
)
NoReading = TypedDict("NoReading", {"problem": str})  # why a command gave no reading
Greedy = TypedDict("Greedy", {"md5": str, "n_prompt": MaybeCount, "n_gen": MaybeCount})
Tests = TypedDict("Tests", {"passed": Count, "failed": list[str], "verdict": str})
Divergence = TypedDict("Divergence", {"kld": float, "ppl_ratio": float})  # of a model from its reference
Reference = TypedDict("Reference", {"ppl": float})

# parts of the agent's replies, besides the journal

ModelFile = TypedDict("ModelFile", {"model_id": Name, "path": Path, "size": Count, "digest": Digest})
Ending = Literal["done", "failed", "cancelled"]
_FinalStatus = TypedDict("_FinalStatus", {"exit_code": Exit, "status": Ending})


class FinalStatus(_FinalStatus, total=False):
    """A job's final status, outside its journal; an older agent's has fewer fields."""

    message: str
    next: str
    journal_sha256: str
