"""What comes back from a host, and the identities that both sides compute alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict, Union

from dgxlab.model.device import gpu_backends
from dgxlab.model.experiment import FileModel, Model
from dgxlab.model.plan import Source
from dgxlab.model.wire import As, Match, Within, digest

Name = Annotated[str, Within(1, 1000)]
Count = Annotated[int, Within(0)]
Sample = Annotated[float, Within(1e-30)]
"""A measured value: all of them are above 0."""
Told = Union[str, None]


@dataclass(frozen=True)
class Toolchain:
    """What turns a source into programs on a host; a version line each, "" for a tool that is not there."""

    cc: str = ""
    cxx: str = ""
    cmake: str = ""
    nvcc: str = ""
    machine: str = ""
    """Architecture and a digest of the CPU flags: GGML_NATIVE compiles for exactly this."""


class _Gpu(TypedDict):
    name: Told
    uuid: Told


class Gpu(_Gpu, total=False):
    """A GPU as nvidia-smi names it, None where it does not say."""

    driver_version: Told
    compute_cap: Told


class Driver(TypedDict):
    """The GPUs' driver, and the newest CUDA that it runs; None where it does not say."""

    version: Told
    cuda: Told


class Disk(TypedDict):
    """The file system of the root."""

    path: str
    total_mib: Count
    free_mib: Count


class Process(TypedDict):
    """A process that computes on a GPU; `used_mib` is None where the driver does not count it."""

    gpu_uuid: str
    pid: Count
    program: str
    user: str
    used_mib: Union[Count, None]


class Tools(TypedDict):
    """Where programs are, "" for one that is not there."""

    git: str
    cmake: str
    ninja: str
    ccache: str
    nvcc: str


class Details(TypedDict, total=False):
    """What else a host says of itself; earlier agents said less."""

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


@dataclass(frozen=True)
class Facts:
    """One look at a host. `probe` of the agent makes it; stored with every job."""

    host_id: Name
    """Digest of the machine id and user: the same box under another name is the same host. Cloned machines share it,
    so it says nothing of the GPUs: see `Device`."""
    hostname: str
    boot_id: Name
    toolchain: Toolchain
    details: Annotated[Mapping[str, Any], As(Details)] = field(default_factory=dict)
    """CPU, memory, kernel, disk, GPUs, driver, tool paths; `Device` is made from them."""


@dataclass(frozen=True)
class Measurement:
    """One metric of one cell in one run.

    Attributes:
        cell: Cell.key.
        metric: llama.cpp's column name: avg_ts, speed_pp, speed_tg, time_us, flops, bandwidth_gb_s.
        unit: As in `units`.
        samples: Counted raw values in the order measured, never empty.
        discarded: Raw values thrown away because the tool's first is cold; kept, not counted.
    """

    cell: Name
    metric: Name
    unit: Name
    samples: Annotated[tuple[Sample, ...], Within(1)]
    discarded: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class CellResult:
    """All that a run says of one cell: its metrics, and the tool's own row as it printed it."""

    cell: str
    measurements: tuple[Measurement, ...]
    raw: Mapping[str, Any] = field(default_factory=dict)


def build_id(source: Source, cmake: Mapping[str, str], toolchain: Toolchain) -> str:
    """Return a build's identity, computed alike by client and agent: 16 hex digits.

    nvcc counts only where CUDA is on, so that installing it does not make a CPU build stale.
    """
    tools = toolchain if "CUDA" in gpu_backends(cmake) else dataclasses.replace(toolchain, nvcc="")
    return digest([source.pin, source.tree, cmake, tools], 16)


def model_id(model: Model) -> str:
    """Return a model's identity: its recipe's digest, or its path until the host has looked at the file."""
    kind = "file" if isinstance(model, FileModel) else "synthetic"
    return f"{kind}-{digest(model, 16)}"
