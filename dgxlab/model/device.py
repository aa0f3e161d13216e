"""What computed a number: the GPUs of a host under one driver, or its processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dgxlab.model.wire import digest

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


def gpu_backends(cmake: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPU backends that are built with these cmake definitions; () for a build that only has the CPU's."""
    return tuple(name for key, name in GPU_BACKENDS.items() if cmake.get(key) == "ON")
