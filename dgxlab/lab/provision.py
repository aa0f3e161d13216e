"""Check what a host has, and send what it lacks: build tools, sources, models. The host needs no internet."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from dgxlab import synth
from dgxlab.agent.files import sha256
from dgxlab.errors import BuildFailed, SpecError, edit
from dgxlab.lab import Side, Watch, noted
from dgxlab.model import Experiment, Facts, ModelStep, Plan, SyntheticModel, events, files_of, model_id
from dgxlab.source import PinCache, packages
from dgxlab.transport import retry
from dgxlab.transport.host import Host, Probe, Stdin
from dgxlab.units import size

BUILD_TOOLS = ("cmake", "ninja")  # build tools that can be sent as wheels. A compiler and git must be installed
_PIECE = 1 << 20  # bytes of a file sent at a time
NOTE_S = 10.0  # period of progress notes during a long transfer; a bar moves with every percent


def probe_for(host: Host, *sides: Side) -> Probe:
    """Return what the host has of the sources and models of both arms; SpecError if it lacks a model file."""
    commits = [commit for side in sides for commit in (side.source.pin, side.source.commit)]
    models = [model for side in sides for model in side.experiment.models.values()]
    paths = [path for model in models for path in files_of(model)]
    recipes = [model_id(model) for model in models if isinstance(model, SyntheticModel)]
    probe = host.probe(*(list(dict.fromkeys(asked)) for asked in (commits, paths, recipes)))
    need_files(host.name, (side.experiment for side in sides), probe.models.get)
    return probe


def need_files(host: str, experiments: Iterable[Experiment], find: Callable[[str], object]) -> None:
    """Raise SpecError if `find`, given the path of a model's file, does not find it on the host."""
    for experiment in experiments:
        for name, model in experiment.models.items():
            for path in files_of(model):
                if not find(path):
                    message = f"model {name} is not on host {host}: there is no file {path}, which the spec names"
                    raise SpecError(message, next=edit(experiment.path))


def prepare(host: Host, sides: Sequence[Side], watch: Watch) -> Probe:
    """Check that a host can build and measure these arms, and return what it has of their sources and models.

    cmake and ninja are sent at once if missing: a build's id, and so what is up to date, depends on cmake's version.

    Raises:
        SpecError: if a model file is not there, or a build tool cannot be sent.
        BuildFailed: if the host lacks a program that cannot be sent.
    """
    question = partial(probe_for, host, *sides)
    probe = retry.again_if_known(host, question, noted(watch))
    facts, tools = probe.facts, probe.facts.details["tools"]
    # check what cannot be sent before sending gigabytes
    needed = {"git": tools["git"], "C compiler": facts.toolchain.cc, "C++ compiler": facts.toolchain.cxx}
    on_nodes = [node.facts for node in probe.nodes if node.facts]
    if host.entry.slurm:  # its jobs build and measure on nodes, which this is not
        needed = {"git": tools["git"]}
    of_cuda = {"NVIDIA GPU": facts.details["gpus"], "nvcc": facts.toolchain.nvcc}
    if not host.entry.slurm and any(side.experiment.cmake.get("GGML_CUDA") == "ON" for side in sides):
        needed |= of_cuda
    for what, there in needed.items():
        if not there:
            asks = ", which GGML_CUDA needs" if what in of_cuda else ""
            raise BuildFailed(f"there is no {what} on host {host.name}{asks}", next=f"dgxlab doctor {host.name}")
    everywhere = [tools, *(each.details["tools"] for each in on_nodes)]
    missing = [name for name in BUILD_TOOLS if not all(there[name] for there in everywhere)]
    for name in missing:
        _send_tool(host, name, facts, watch)
    return retry.again_if_known(host, question, noted(watch)) if missing else probe


def send(cache: PinCache, host: Host, job: Plan, probe: Probe, watch: Watch) -> None:
    """Send the sources and models that a job needs and the host, by its probe, neither has nor can make."""

    def send_objects(commit: str, pin: str, there: Sequence[str]) -> None:
        retry.again(host, lambda: host.send_objects(commit, [pin], partial(cache.pack, [commit], there)), noted(watch))

    missing = set(probe.missing)
    for source in (arm.source for arm in job.arms):
        if source.pin in missing:
            noted(watch)(f"sending pin {source.pin[:12]} to {host.name}")
            send_objects(source.pin, source.pin, [])
        if source.commit != source.pin and source.commit in missing:  # a patched tree: its few changed objects
            send_objects(source.commit, source.pin, [source.pin])
        missing -= {source.pin, source.commit}  # the arms of a session share their pin
    models = {step.recipe: step.model for step in job.steps if isinstance(step, ModelStep)}
    for recipe, name in models.items():
        if isinstance(recipe, SyntheticModel) and model_id(recipe) in probe.to_send:
            _send_model(cache, host, name, recipe, watch)


def wheel_for(name: str, facts: Facts) -> packages.Wheel:
    """Return the newest wheel of a build tool that runs on a host; raises SourceError if there is none."""
    return packages.find_wheel(name, facts.toolchain.machine.partition(" ")[0], facts.details["glibc"])


def _send_tool(host: Host, name: str, facts: Facts, watch: Watch) -> None:
    tell = noted(watch)
    try:
        wheel = wheel_for(name, facts)
        file = packages.fetch_wheel(wheel, tell)
    except packages.SourceError as error:
        message = f"host {host.name} has no {name}, and none can be sent: {error}"
        raise SpecError(message, next=host.entry.typed("sudo apt-get install cmake ninja-build")) from error
    tell(f"sending {name} {wheel.version}, {size(file.stat().st_size)}, to {host.name}, which has none")
    body = _reading(file, f"{name} to {host.name}", watch)
    retry.again(host, lambda: host.send_tool(name, wheel.version, wheel.sha256, body), tell)


def _send_model(cache: PinCache, host: Host, name: str, recipe: SyntheticModel, watch: Watch) -> None:
    """Write a model's f16 file here and send it; the host quantises it."""
    tell, large = noted(watch), size(synth.size(recipe))
    tell(f"making model {name} here and sending {large} to {host.name}, whose Python has no gguf package")
    with cache.scratch() as folder:
        file = folder / "f16.gguf"
        synth.write(recipe, file, vocabulary(cache, recipe, folder) if recipe.vocab else None)
        digest, body = sha256(file), _reading(file, f"model {name} to {host.name}", watch)
        retry.again(host, lambda: host.send_model(model_id(recipe), digest, body), tell)


def vocabulary(cache: PinCache, recipe: SyntheticModel, folder: Path) -> Path:
    """Copy the vocabulary that a recipe names from llama.cpp's tree into a folder, and return the file's path."""
    cache.require(recipe.vocab_pin)
    file = folder / "vocabulary.gguf"
    file.write_bytes(cache.git.read("cat-file", "blob", f"{recipe.vocab_pin}:{synth.vocabulary_path(recipe)}"))
    return file


def _reading(file: Path, what: str, watch: Watch) -> Stdin:
    """Return a function that yields a file in pieces, from the start on each call, and reports progress."""
    total = file.stat().st_size

    def read() -> Iterator[bytes]:
        noted_s, percent = time.monotonic(), 0
        with file.open("rb") as stream:
            while piece := stream.read(_PIECE):
                yield piece
                if stream.tell() * 100 // total > percent:
                    percent = stream.tell() * 100 // total
                    watch(events.ProgressEvent(id="sending", done=percent, total=100, note=what))
                if time.monotonic() - noted_s > NOTE_S:
                    noted_s = time.monotonic()
                    watch(events.NoteEvent(note=f"sent {size(stream.tell())} of {size(total)}, {what}"))

    return read
