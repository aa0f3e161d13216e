"""Results from a host, the device that computed them, and ids that client and agent compute alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from dgxlab.model.experiment import DerivedModel, FileModel, Model, files_of
from dgxlab.model.parts import Details, Name, Sample
from dgxlab.model.plan import Source
from dgxlab.model.wire import Within, decoder, digest

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
"""By cmake key, llama.cpp's name of the backend; a device name adds a number."""

_UUID_DIGITS = 12  # characters of a GPU's uuid that reports show: `GPU-1a69cc14`


@dataclass(frozen=True)
class Toolchain:
    """Build tools of a host, with a version line each; "" for a missing tool."""

    cc: str = ""
    cxx: str = ""
    cmake: str = ""
    nvcc: str = ""
    machine: str = ""  # architecture and a digest of the CPU flags: GGML_NATIVE compiles for exactly this


@dataclass(frozen=True)
class Facts:
    """One look at a host, stored with every job."""

    host_id: Name  # digest of the machine id and user: the same under another name, and on cloned machines
    hostname: str
    boot_id: Name
    toolchain: Toolchain
    details: Annotated[Mapping[str, Any], decoder(Details)] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """The GPUs or the processor of one host, as a job saw them; numbers of different devices are never mixed."""

    host_id: str
    names: tuple[str, ...]  # of each GPU in nvidia-smi's order, or of the processor
    uuids: tuple[str, ...] = ()  # of each GPU; this and what follows is empty for the processor
    driver: str = ""
    compute_cap: str = ""  # of each different GPU, `9.0`
    cpus: int = 0  # processors that programs may use; 0 for GPUs

    @classmethod
    def of(cls, facts: Mapping[str, Any], cmake: Mapping[str, str]) -> Device:
        """Return the device for a build with these cmake definitions, given the job's `Facts` as JSON."""
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
        return ", ".join(f"{name} {uuid[:_UUID_DIGITS]}".strip() for name, uuid in pairs)


@dataclass(frozen=True)
class Measurement:
    """One metric of one cell in one run: raw values in the order measured."""

    cell: Name
    metric: Name  # llama.cpp's column name: avg_ts, speed_pp, speed_tg, time_us, flops, bandwidth_gb_s
    unit: Name
    samples: Annotated[tuple[Sample, ...], Within(1)]
    discarded: tuple[Sample, ...] = ()  # kept but not counted: the tool's first is cold


@dataclass(frozen=True)
class CellResult:
    """A run's result for one cell: its metrics, and the tool's printed row."""

    cell: str
    measurements: tuple[Measurement, ...]
    raw: Mapping[str, Any] = field(default_factory=dict)


def gpu_backends(cmake: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPU backends that are built with these cmake definitions; () for a CPU build."""
    return tuple(name for key, name in GPU_BACKENDS.items() if cmake.get(key) == "ON")


def build_id(source: Source, cmake: Mapping[str, str], toolchain: Toolchain) -> str:
    """Return a build's identity, computed alike by client and agent: 16 hex digits.

    nvcc counts only where CUDA is on, so that installing it does not make a CPU build stale.
    """
    tools = toolchain if "CUDA" in gpu_backends(cmake) else dataclasses.replace(toolchain, nvcc="")
    return digest([source.pin, source.tree, cmake, tools], 16)


def model_id(model: Model, files: Mapping[str, str] | None = None) -> str:
    """Return a model's id: the digest of its recipe, in which files are named by their own ids.

    Args:
        files: The ids of the host's files by path. Without them a file is known by its path alone.
    """
    known = files or {}
    if isinstance(model, FileModel):
        return known.get(model.path, f"file-{digest(model, 16)}")
    kind = "derived" if files_of(model) else "synthetic"
    return f"{kind}-{digest(_by_content(model, known), 16)}"


def _by_content(model: Model, files: Mapping[str, str]) -> Model:
    if isinstance(model, FileModel):
        return FileModel(files.get(model.path, model.path))
    if isinstance(model, DerivedModel):
        source, imatrix = _by_content(model.source, files), files.get(model.imatrix, model.imatrix)
        return dataclasses.replace(model, source=source, imatrix=imatrix)
    return model
