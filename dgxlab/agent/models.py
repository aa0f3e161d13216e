"""Models on the host: existing files, and synthetic models written from their recipe."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from dgxlab.agent.boot import settle
from dgxlab.agent.environment import Root, measured_env
from dgxlab.agent.files import incoming, sha256
from dgxlab.errors import RemoteError, SpecError, command
from dgxlab.model import DerivedModel, ModelStep, SyntheticModel

if TYPE_CHECKING:  # `identify` answers a probe, which needs no parsers
    from dgxlab.agent.measure import Launch
    from dgxlab.model.events import ModelEvent

SPOT = 1 << 20
"""Bytes of a file's beginning and end that identify it: hashing 20 GB would take longer than a session."""


def identify(path: str) -> dict[str, Any] | None:
    """Return model_id, absolute path, size and digest of a model file, None when it is missing."""
    file = Path(path).expanduser()
    if not file.is_file():
        return None
    stat = file.stat()
    with file.open("rb") as stream:
        head = stream.read(SPOT)
        stream.seek(max(0, stat.st_size - SPOT))
        spots = hashlib.sha256(head + stream.read(SPOT)).hexdigest()
    identity = hashlib.sha256(f"{stat.st_size} {stat.st_mtime_ns} {spots}".encode()).hexdigest()[:16]
    return {"model_id": f"file-{identity}", "path": str(file), "size": stat.st_size, "digest": f"spots:{spots}"}


def find(step: ModelStep) -> ModelEvent:
    """Return the event of a model file.

    Raises:
        SpecError: if it is not on the host.
    """
    if (file := identify(step.path)) is None:
        raise SpecError(
            f"model {step.model} is not on the host: there is no file {step.path}; put it there, or change "
            f"models.{step.model}.path",
            next=command("ls", "-l", step.path.rpartition("/")[0]),
        )
    return _event(step, file, reused=True)


def _event(step: ModelStep, file: Mapping[str, Any], *, reused: bool) -> ModelEvent:
    from dgxlab.model.events import ModelEvent  # imported late: a probe, which imports this module, should be quick

    return ModelEvent(name=step.model, recipe=step.recipe, seconds=0.0, reused=reused, **file)


def to_send(root: Root, model_ids: Sequence[str]) -> list[str]:
    """Return the synthetic models that are missing on this host and that it cannot write itself."""
    missing = [
        name for name in model_ids if not _finished(root.models / f"{name}.gguf") and not _sent(root, name).exists()
    ]
    if not missing:
        return []
    # asks a job's Python: the agent's own does not see the user's packages
    code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('gguf') and u.find_spec('numpy')))"
    argv = [sys.executable, "-c", code]
    ran = subprocess.run(argv, env=measured_env({}), cwd="/", capture_output=True, check=False)
    return missing if ran.returncode else []


def receive(root: Root, model_id: str, sha256: str, stream: IO[bytes]) -> None:
    """Store a synthetic model's f16 file from a stream; `synthesize` then need not write it.

    Raises:
        RemoteError: if the file is incomplete, or the disk is full.
    """
    with incoming(stream, sha256, root.models, f"model {model_id}") as file:
        settle(file, _sent(root, model_id))


def synthesize(
    root: Root,
    step: ModelStep,
    model_id: str,
    path: Path,
    launch: Callable[[str, Sequence[str]], Launch],
    *,
    source: Path | None = None,
) -> ModelEvent:
    """Write and quantise a synthetic model unless it exists; return its event.

    Args:
        source: The finished model that it is derived from, None to write it from its recipe.

    Raises:
        RemoteError: if gguf is not installed, the disk is full, or llama-quantize does not know the type.
    """
    root.models.mkdir(parents=True, exist_ok=True)
    record, sent = path.with_suffix(".json"), _sent(root, model_id)
    written, part = (path.with_name(f".{path.stem}{kind}-{os.getpid()}.gguf") for kind in ("-f16", ""))
    try:
        written.unlink(missing_ok=True)  # left by a killed agent with the same pid
        # link first, then check for the finished model: another job removes the sent file when it has finished
        with contextlib.suppress(FileNotFoundError):
            written.hardlink_to(sent)
        reused = _finished(path)
        if not reused:
            if not source and not written.exists():
                _write(root, step, written, launch)
            if step.quantize:
                _make(launch, f"{step.id}-quantize", step.quantize, {"{in}": source or written, "{out}": part})
                _check_types(step.recipe, part)
            else:
                written.rename(part)
            fields = {"size": part.stat().st_size, "digest": f"sha256:{sha256(part)}"}
            settle(part, path)
            part.write_text(json.dumps(fields))
            settle(part, record)
        sent.unlink(missing_ok=True)
    finally:
        written.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    record.touch()  # its last use, for `host clean`
    return _event(step, {"model_id": model_id, "path": str(path), **json.loads(record.read_text())}, reused=reused)


def _check_types(recipe: SyntheticModel | DerivedModel | None, file: Path) -> None:
    """Raise RemoteError if a tensor's type is not the requested one."""
    from dgxlab import gguf_header, synth  # imported late, as Objects

    if recipe:
        written = recipe.source if isinstance(recipe, DerivedModel) else recipe
        synth.check_types(written, recipe.quant, gguf_header.read(file))


def _finished(path: Path) -> bool:
    """Return whether a model and its record both exist; each is renamed into place when complete."""
    try:
        return bool(path.stat().st_size == json.loads(path.with_suffix(".json").read_text())["size"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _sent(root: Root, model_id: str) -> Path:
    """Return the path of a model's f16 file between its arrival and the job that quantises it."""
    return root.models / f"{model_id}-f16.gguf"


def _write(root: Root, step: ModelStep, out: Path, launch: Callable[[str, Sequence[str]], Launch]) -> None:
    """Write the f16 file; the vocabulary of the recipe's pin is beside it meanwhile."""
    from dgxlab.agent.objects import Objects  # imported late: a probe, which imports this module, should be quick
    from dgxlab.synth import vocabulary_path

    recipe, vocabulary = step.recipe, out.with_suffix(".vocab")
    try:
        if isinstance(recipe, SyntheticModel) and recipe.vocab:
            Objects(root.objects).copy(recipe.vocab_pin, vocabulary_path(recipe), vocabulary)
        _make(launch, f"{step.id}-write", step.make, {"{out}": out, "{vocab}": vocabulary})
    finally:
        vocabulary.unlink(missing_ok=True)


def _make(
    launch: Callable[[str, Sequence[str]], Launch], name: str, argv: Sequence[str], paths: Mapping[str, Path]
) -> None:
    launched = launch(name, [str(paths.get(arg, arg)) for arg in argv])
    if not launched.ended.ok:
        why = launched.ended.reason(Path(argv[0]).name, 0, launched.last_words())
        raise RemoteError(
            f"the synthetic model was not made: {why}",
            next=f"dgxlab logs {launched.stderr.parent.parent.name} raw/{launched.stderr.name}",
        )
