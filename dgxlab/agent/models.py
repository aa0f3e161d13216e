"""Models on the host: files that are there, and synthetic ones written from their recipe."""

from __future__ import annotations

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
from dgxlab.model import ModelStep, SyntheticModel

if TYPE_CHECKING:  # `identify` answers a probe, which needs no parsers
    from dgxlab.agent.measure import Launch
    from dgxlab.model.events import ModelEvent

SPOT = 1 << 20
"""Bytes of a file's beginning and end that go into its identity; hashing 20 GB before each session would take longer
than the session."""


def identify(path: str) -> dict[str, Any] | None:
    """Return identity, absolute path, size and digest of a model file, None when it is not there."""
    file = Path(path).expanduser()
    if not file.is_file():
        return None
    stat = file.stat()
    with file.open("rb") as stream:
        head = stream.read(SPOT)
        stream.seek(max(0, stat.st_size - SPOT))
        tail = stream.read(SPOT)
    spots = hashlib.sha256(head + tail).hexdigest()
    text = f"{stat.st_size} {stat.st_mtime_ns} {spots}"
    identity = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"model_id": f"file-{identity}", "path": str(file), "size": stat.st_size, "digest": f"spots:{spots}"}


def find(step: ModelStep) -> ModelEvent:
    """Return what to tell of a model file.

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
    from dgxlab.model.events import ModelEvent  # only here: a probe comes by, which should be quick

    return ModelEvent(
        name=step.model,
        model_id=file["model_id"],
        path=file["path"],
        size=file["size"],
        digest=file["digest"],
        recipe=step.recipe,
        seconds=0.0,
        reused=reused,
    )


def to_send(root: Root, model_ids: Sequence[str]) -> list[str]:
    """Return those synthetic models that are not here in any form and cannot be written here either."""
    finished = {name for name in model_ids if _finished(root.models / f"{name}.gguf")}
    missing = [name for name in model_ids if name not in finished and not _sent(root, name).exists()]
    if not missing:
        return []
    # what `synth` needs is looked for in a job's Python, which finds packages where the agent's own does not
    code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('gguf') and u.find_spec('numpy')))"
    argv = [sys.executable, "-c", code]
    ran = subprocess.run(argv, env=measured_env({}), cwd="/", capture_output=True, check=False)
    return missing if ran.returncode else []


def receive(root: Root, model_id: str, sha256: str, stream: IO[bytes]) -> None:
    """Take a synthetic model's f16 file from a stream; `synthesize` then writes none.

    Raises:
        RemoteError: if it did not arrive whole, or the disk is full.
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
    """Return what to tell of a synthetic model, written and quantised first where it is not there yet.

    Args:
        source: The finished model that it is made from, None where it is written.

    Raises:
        RemoteError: if gguf is not at hand, the disk is full, or llama-quantize does not know the type.
    """
    root.models.mkdir(parents=True, exist_ok=True)
    record, sent = path.with_suffix(".json"), _sent(root, model_id)
    written = path.with_name(f".{path.stem}-f16-{os.getpid()}.gguf")
    part = path.with_name(f".{path.stem}-{os.getpid()}.gguf")
    try:
        # before the finished one is looked for: a job that has used up what was sent has finished it
        written.unlink(missing_ok=True)  # of a killed agent with the same pid
        try:
            written.hardlink_to(sent)  # a name of its own, because another job may be done with it first
            have = True
        except FileNotFoundError:
            have = False
        reused = _finished(path)
        if not reused:
            if not have and not source:
                _write(root, step, written, launch)
            if step.quantize:
                _make(launch, f"{step.id}-quantize", _fill(step.quantize, source=source or written, out=part))
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
    file = {"model_id": model_id, "path": str(path), **json.loads(record.read_text())}
    return _event(step, file, reused=reused)


def _finished(path: Path) -> bool:
    """Tell whether a model and its record are there, both whole: they got their names one after the other."""
    try:
        return bool(path.stat().st_size == json.loads(path.with_suffix(".json").read_text())["size"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _sent(root: Root, model_id: str) -> Path:
    """Return where a model's f16 file lies between its arrival and the job that quantises it."""
    return root.models / f"{model_id}-f16.gguf"


def _write(root: Root, step: ModelStep, out: Path, launch: Callable[[str, Sequence[str]], Launch]) -> None:
    """Write the f16 file, with the vocabulary of the recipe's pin beside it while it is read."""
    from dgxlab.agent.objects import Objects  # only here: a probe comes by, which should be quick
    from dgxlab.synth import vocabulary_path

    recipe, vocabulary = step.recipe, out.with_suffix(".vocab")
    try:
        if isinstance(recipe, SyntheticModel) and recipe.vocab:
            Objects(root.objects).copy(recipe.vocab_pin, vocabulary_path(recipe), vocabulary)
        _make(launch, f"{step.id}-write", _fill(step.make, out=out, vocabulary=vocabulary))
    finally:
        vocabulary.unlink(missing_ok=True)


def _fill(argv: Sequence[str], *, out: Path, source: Path | None = None, vocabulary: Path | None = None) -> list[str]:
    known = {"{out}": out, "{in}": source, "{vocab}": vocabulary}
    return [str(known.get(arg) or arg) for arg in argv]


def _make(launch: Callable[[str, Sequence[str]], Launch], name: str, argv: Sequence[str]) -> None:
    launched = launch(name, argv)
    if not launched.ended.ok:
        why = launched.ended.reason(Path(argv[0]).name, 0, launched.last_words())
        raise RemoteError(
            f"the synthetic model was not made: {why}",
            next=f"dgxlab logs {launched.stderr.parent.parent.name} raw/{launched.stderr.name}",
        )
