"""Hosts: how to reach one, its facts and devices, the results from it, and ids that client and agent compute alike."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Union

from dgxlab.errors import AGAIN
from dgxlab.model.experiment import DerivedModel, FileModel, Model, files_of
from dgxlab.model.parts import Details, Name, Sample
from dgxlab.model.plan import Source
from dgxlab.model.slurm import Slurm
from dgxlab.model.wire import Within, canonical, decoder, digest

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
"""llama.cpp's names of GPU backends by cmake option; a device is named by backend and number, as CUDA0."""

_UUID_DIGITS = 12  # characters of a GPU's uuid that reports show: `GPU-1a69cc14`


@dataclass(frozen=True)
class Toolchain:
    """Versions of a host's build tools, a line each; "" for a missing tool."""

    cc: str = ""
    cxx: str = ""
    cmake: str = ""
    nvcc: str = ""
    machine: str = ""  # architecture and a digest of the CPU flags: GGML_NATIVE compiles for exactly this


@dataclass(frozen=True)
class Facts:
    """A host's identity, toolchain and further details at one time; every job stores them."""

    host_id: Name  # digest of the machine id and user: the same under another name, and on cloned machines
    hostname: str
    boot_id: Name
    toolchain: Toolchain
    details: Annotated[Mapping[str, Any], decoder(Details)] = field(default_factory=dict)


@dataclass(frozen=True)
class Device:
    """What a job measures on: the GPUs, or the processor, of one host. Values of different devices are never mixed."""

    host_id: str
    names: tuple[str, ...]  # of each GPU in nvidia-smi's order, or of the processor
    uuids: tuple[str, ...] = ()  # of each GPU; this and what follows is empty for the processor
    driver: str = ""
    compute_cap: str = ""  # of each different GPU, `9.0`
    cpus: int = 0  # processors that programs may use; 0 for GPUs

    @classmethod
    def of(cls, facts: Mapping[str, Any], cmake: Mapping[str, str]) -> Device:
        """Return the device of a job, given its `Facts` as JSON and its build's cmake definitions."""
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
        """Digest of the fields, 16 hex digits."""
        return digest(self, 16)

    @property
    def label(self) -> str:
        """The device's name for reports: `NVIDIA H200 GPU-1a69cc14`, `AMD EPYC, 2 processors`."""
        if not self.uuids:
            return f"{self.names[0]}, {self.cpus} processors" if self.cpus else self.names[0]
        pairs = zip(self.names, self.uuids, strict=True)
        return ", ".join(f"{name} {uuid[:_UUID_DIGITS]}".strip() for name, uuid in pairs)


@dataclass(frozen=True)
class Measurement:
    """The raw values of one metric of one cell in one run, in the order measured."""

    cell: Name
    metric: Name  # llama.cpp's column name: avg_ts, speed_pp, speed_tg, time_us, flops, bandwidth_gb_s
    unit: Name
    samples: Annotated[tuple[Sample, ...], Within(1)]
    discarded: tuple[Sample, ...] = ()  # kept but not counted: the tool's first is cold


@dataclass(frozen=True)
class CellResult:
    """A run's measurements of one cell (a Cell.key), and the row that the tool printed for it."""

    cell: str
    measurements: tuple[Measurement, ...]
    raw: Mapping[str, Any] = field(default_factory=dict)


def gpu_backends(cmake: Mapping[str, str]) -> tuple[str, ...]:
    """Return llama.cpp's names of the GPU backends that cmake definitions switch on; () for a CPU build."""
    return tuple(name for key, name in GPU_BACKENDS.items() if cmake.get(key) == "ON")


def build_id(source: Source, cmake: Mapping[str, str], toolchain: Toolchain) -> str:
    """Return the digest of all that determines a build, 16 hex digits; client and agent compute the same."""
    # installing nvcc must not make a CPU build stale
    tools = toolchain if "CUDA" in gpu_backends(cmake) else dataclasses.replace(toolchain, nvcc="")
    return digest([source.pin, source.tree, cmake, tools], 16)


def model_id(model: Model, files: Mapping[str, str] | None = None) -> str:
    """Return a model's id: that of its file, else a digest of its recipe with each file path replaced by the file's id.

    `files` has the ids of files on the host, by path. The id of any other file depends on its path alone.
    """
    known = files or {}
    if isinstance(model, FileModel):
        return known.get(model.path, f"file-{digest(model, 16)}")
    kind = "derived" if files_of(model) else "synthetic"
    return f"{kind}-{digest(_by_content(model, known), 16)}"


def model_read(model: Model, read: Iterable[Mapping[str, Any]]) -> str:
    """Return a model's id. For one that reads files, it is that of what a host last read; "unknown" if none did.

    `read` are rows of the record with model_id, path and recipe, the newest last.
    """
    if not files_of(model):
        return model_id(model)
    if isinstance(model, FileModel):
        ids = [row["model_id"] for row in read if is_at(model.path, row["path"] or "")]
    else:
        ids = [row["model_id"] for row in read if row["recipe"] == canonical(model)]
    return str(ids[-1]) if ids else "unknown"


def is_at(path: str, read: str) -> bool:
    """Return whether the file at `read` of a host is the one that a spec calls `path`, which may begin with ~/."""
    return read == path or (path.startswith("~/") and read.endswith(path[1:]))


def _by_content(model: Model, files: Mapping[str, str]) -> Model:
    if isinstance(model, FileModel):
        return FileModel(files.get(model.path, model.path))
    if isinstance(model, DerivedModel):
        source, imatrix = _by_content(model.source, files), files.get(model.imatrix, model.imatrix)
        return dataclasses.replace(model, source=source, imatrix=imatrix)
    return model


_WORD = r"(?:(?!-)[A-Za-z0-9_@%+=:,./~-]+|'[^'\x00-\x1f\x7f]*')"
_ON_CLIENT = re.compile(
    rf"{AGAIN}(?: with --(?:wait [0-9]{{1,6}}|max-minutes [0-9]{{1,6}}))?"
    rf"|dgxlab (?:report|attach|doctor|logs)(?: {_WORD}){{1,2}}|dgxlab host clean {_WORD} --older-than 0 --dry-run"
)
"""Commands that an agent's error may suggest for the client: the same one again, or one that only reads."""
_ON_HOST = re.compile(
    rf"sudo chmod 1777 /tmp|sudo apt-get install cmake ninja-build|(?:df -h|ls -l) {_WORD}|{_WORD} --version"
)
"""Commands that an agent's error may suggest for the host."""


@dataclass(frozen=True)
class HostEntry:
    """One entry of hosts.yaml: a host and how to reach it."""

    name: str
    ssh: str = ""  # an alias of ssh's configuration, user@host or ssh://user@host:port; "" is this machine
    root: str = "~/.dgxlab"  # the agent's folder there
    python: str = ""  # runs the agent there; "" is ssh's python3, or this program's own on this machine
    path_prepend: tuple[str, ...] = ()  # folders that come first on PATH there; may begin with ~/
    env: Mapping[str, str] = field(default_factory=dict)  # for every program there, compilers too
    processors: Union[tuple[int, ...], None] = None  # numbers of those that its sessions may use; None for all
    lock: str = ""  # a file in which people who share the machine say that they measure; may begin with ~/
    slurm: Union[Slurm, None] = None  # submit jobs to Slurm there, instead of starting them on that machine
    file: str = field(default="", compare=False)  # the hosts.yaml that has this entry

    def typed(self, command: str) -> str:
        """Return what to type on the client to run `command` on this host: `ssh -t HOST COMMAND`."""
        if not self.ssh:
            return command
        words = command if re.fullmatch(r"[\w@%+=:,./ -]*", command) else shlex.quote(command)
        return f"ssh -t {shlex.quote(self.ssh)} {words}"  # -t: sudo asks for a password

    def next_of_agent(self, command: str) -> str:
        """Return what to type on the client for the `next` of an agent's error; "" if its form is not allowed."""
        if _ON_HOST.fullmatch(command):
            return self.typed(command)
        return command if _ON_CLIENT.fullmatch(command) else ""
