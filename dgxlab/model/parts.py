"""Types of fields: texts and numbers with their limits, and JSON objects that are stored as they arrive."""

# ruff: noqa: UP013 - a map of few keys is a line

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypedDict, Union

from dgxlab.model.wire import Text, Within

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
Role = Annotated[str, Text("burn-in|baseline|candidate")]
MaybeText = Union[str, None]
MaybeCount = Union[Count, None]
Number = Union[float, None]

# a host's facts; None where unknown

_Driver = TypedDict("_Driver", {"version": MaybeText, "cuda": MaybeText})
Disk = TypedDict("Disk", {"path": str, "total_mib": Count, "free_mib": Count})
Process = TypedDict("Process", {"gpu_uuid": str, "pid": Count, "program": str, "user": str, "used_mib": MaybeCount})
Tools = TypedDict("Tools", {"git": str, "cmake": str, "ninja": str, "ccache": str, "nvcc": str})
_Gpu = TypedDict("_Gpu", {"name": MaybeText, "uuid": MaybeText})


class Gpu(_Gpu, total=False):
    """A GPU of a host, from nvidia-smi."""

    driver_version: MaybeText
    compute_cap: MaybeText


class Details(TypedDict, total=False):
    """`Facts.details`; older agents report fewer."""

    user: str
    kernel: str
    os: str
    glibc: Annotated[str, Text(r"([0-9]{1,4}(\.[0-9]{1,4})+)?")]
    python: str
    cpu: str
    cpus: Count
    memory_mib: Count
    mem_available_mib: Count
    disk: Disk
    gpus: list[Gpu]
    driver: _Driver
    nvidia_devices: Count
    gpu_processes: list[Process]
    lock_folder: str
    versions: Mapping[str, str]
    tools: Tools
    slurm: Mapping[str, str]  # what Slurm allocated to the job; {} without Slurm
    logout_kills: str  # the file that makes systemd end a user's processes at logout; "" for none


_Graphics = TypedDict("_Graphics", {"uuid": MaybeText})  # a GPU's state: nvidia-smi's fields as it printed them


class State(TypedDict, total=False):
    """The condition of a host right before or after a run; older agents report less."""

    boot_id: str
    gpus: Union[list[_Graphics], None]
    load_1min: Number
    mem_available_mib: Number
    swap_used_mib: Number
    swap_in_mib: Number
    oom_kills: Number
    cpu_mhz: Number
    cpu_temp_c: Number
    pinned: list[Count]  # the processors that the program was pinned to, before a run that was


Fidelity = TypedDict(  # of the weights of a class of tensors to the source's; nmse is None for types without a decoder
    "Fidelity", {"types": str, "weights": Count, "sampled": Count, "nmse": Number, "sqnr_db": Number}
)
_Contents = TypedDict(
    "_Contents",
    {
        "architecture": str,
        "parameters": Count,
        "type": str,  # that most weights have
        "bits": Annotated[float, Within(0)],  # a weight, scales included
        "files": Mapping[Path, Name],  # ids of the host's files that it was made from, by path
        "requantised": bool,  # from weights that were quantised before: good for speed, not for quality
        "fidelity": Mapping[Name, Fidelity],  # by class of tensors; {} for an existing file
    },
)


class Contents(_Contents, total=False):
    """What is known of a model's GGUF file, from its header and from making it; an older agent wrote fewer fields."""

    per_token: Count  # bytes of weights that generating a token reads


# parts of the agent's replies, besides the journal

ModelFile = TypedDict("ModelFile", {"model_id": Name, "path": Path, "size": Count, "digest": Digest})
Ending = Literal["done", "failed", "cancelled"]
_FinalStatus = TypedDict("_FinalStatus", {"exit_code": Exit, "status": Ending})


class FinalStatus(_FinalStatus, total=False):
    """A job's final status, which is not in its journal; an older agent wrote fewer fields."""

    message: str
    next: str
    journal_sha256: str
