"""What comes back from a host, what computed it, and the identities that both sides compute alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypedDict, Union

from dgxlab.model.experiment import FileModel, Model
from dgxlab.model.plan import Source
from dgxlab.model.wire import As, Match, Within, digest

Name = Annotated[str, Within(1, 1000)]
Count = Annotated[int, Within(0)]
Sample = Annotated[float, Within(1e-30)]
"""A measured value: all of them are above 0."""
_Told = Union[str, None]

GPU_BACKENDS: Mapping[str, str] = {
    "GGML_CUDA": "CUDA",
    "GGML_HIP": "ROCm",
    "GGML_MUSA": "MUSA",
    "GGML_VULKAN": "Vulkan",
    "GGML_METAL": "MTL",
    "GGML_SYCL": "SYCL",
    "GGML_OPENCL": "GPUOpenCL",
    "GGML_CANN": "CANN",
    "GGML_WEBGPU": "WebGPU",
}
"""By cmake key, what llama.cpp's tools call the backend that it builds; a device of it has a number behind."""

UUID_DIGITS = 12
"""Characters of a GPU's uuid that reports show: `GPU-1a69cc14`."""


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
    name: _Told
    uuid: _Told


class Gpu(_Gpu, total=False):
    """A GPU as nvidia-smi names it, None where it does not say."""

    driver_version: _Told
    compute_cap: _Told


class Driver(TypedDict):
    """The GPUs' driver, and the newest CUDA that it runs; None where it does not say."""

    version: _Told
    cuda: _Told


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
class Device:
    """One device of one host, as a job saw it; numbers of two devices are never taken for each other's.

    Attributes:
        host_id: Facts.host_id.
        names: Of each GPU in nvidia-smi's order, or of the processor.
        uuids: Of each GPU; () for the processor.
        driver: Of the GPUs, "" for the processor.
        compute_cap: Of each different GPU, `9.0`; "" for the processor.
        cpus: Processors that programs may use; 0 for GPUs.
    """

    host_id: str
    names: tuple[str, ...]
    uuids: tuple[str, ...] = ()
    driver: str = ""
    compute_cap: str = ""
    cpus: int = 0

    @classmethod
    def of(cls, facts: Mapping[str, Any], cmake: Mapping[str, str]) -> Device:
        """Return what a build with these cmake definitions computes on.

        Args:
            facts: `Facts` of the job as JSON.
        """
        details = facts.get("details", {})
        if not gpu_backends(cmake):
            return cls(facts["host_id"], (details.get("cpu") or "unknown processor",), cpus=details.get("cpus") or 0)
        gpus = details.get("gpus") or [{}]
        return cls(
            facts["host_id"],
            tuple(gpu.get("name") or "unknown GPU" for gpu in gpus),
            tuple(gpu.get("uuid") or "" for gpu in gpus),
            gpus[0].get("driver_version") or "",
            ",".join(dict.fromkeys(gpu.get("compute_cap") or "" for gpu in gpus)),
        )

    @property
    def id(self) -> str:
        """Identity, 16 hex digits."""
        return digest(self, 16)

    @property
    def label(self) -> str:
        """Name it for people: `NVIDIA H200 GPU-1a69cc14`, `AMD EPYC, 2 processors`."""
        if not self.uuids:
            return f"{self.names[0]}, {self.cpus} processors" if self.cpus else self.names[0]
        pairs = zip(self.names, self.uuids, strict=True)
        return ", ".join(f"{name} {uuid[:UUID_DIGITS]}".strip() for name, uuid in pairs)


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


def gpu_backends(cmake: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPU backends that are built with these cmake definitions; () for a build that only has the CPU's."""
    return tuple(name for key, name in GPU_BACKENDS.items() if cmake.get(key) == "ON")


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
