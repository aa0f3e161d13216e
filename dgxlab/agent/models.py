"""Models on the host: existing files, and models that are made from their recipes."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from dgxlab.agent.boot import me, settle
from dgxlab.agent.environment import Root, measured_env
from dgxlab.agent.files import incoming, sha256
from dgxlab.errors import RemoteError, SpecError, command
from dgxlab.model import ModelStep, SyntheticModel, files_of, quantisation

if TYPE_CHECKING:  # `identify` answers a probe, which needs no parsers
    from dgxlab.agent.measure import Launched
    from dgxlab.gguf_header import Header
    from dgxlab.model.events import ModelEvent
    from dgxlab.model.parts import Contents

    Launcher = Callable[[str, Sequence[str]], Launched]  # runs a program, given the name of its raw files and its argv

_UNREAD = "unread"  # id and digest of a file that has not been read yet


def identify(root: Root, path: str, *, read: bool = False) -> dict[str, Any] | None:
    """Return model_id, absolute path, size and digest of a file, None if it is missing.

    The id depends on the content. The sha256 is kept by inode, size and time of change; if it is not known, id and
    digest are "unread", unless `read` is set: 20 GB take half a minute. Raises RemoteError if the file changes while it
    is read.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        return None
    stamp = _stamp(file)
    kept = root.digests / stamp
    digest = kept.read_text() if kept.exists() else ""
    if read and not digest:
        digest = sha256(file)
        if _stamp(file) != stamp:
            raise RemoteError(f"{file} changes while it is read", next=command("ls", "-l", file))
        part = kept.with_name(f".{stamp}-{me()}")
        part.write_text(digest)
        settle(part, kept)
    known = {"model_id": f"file-{digest[:16]}", "digest": f"sha256:{digest}"} if digest else {}
    return {"model_id": _UNREAD, "digest": _UNREAD, "path": str(file), "size": file.stat().st_size, **known}


def _stamp(file: Path) -> str:
    stat = file.stat()
    return f"{stat.st_dev}-{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"


def _identified(root: Root, name: str, path: str) -> dict[str, Any]:
    """Return `identify` of a model's file, with its content read; raises SpecError if it is not on the host."""
    if (file := identify(root, path, read=True)) is None:
        message = f"model {name} is not on the host: there is no file {path}; put it there, or change models.{name}"
        raise SpecError(message, next=command("ls", "-l", path.rpartition("/")[0]))
    return file


def files(root: Root, step: ModelStep) -> dict[str, str]:
    """Return the ids of the files that a model's recipe names, by path; raises SpecError if one is not on the host."""
    paths = files_of(step.recipe) if step.recipe else ()
    return {path: _identified(root, step.model, path)["model_id"] for path in paths}


def find(root: Root, step: ModelStep) -> ModelEvent:
    """Return the event of a model that is a file on the host.

    Raises SpecError if there is no such file, or it is not a complete GGUF file.
    """
    from dgxlab import gguf_header

    file = _identified(root, step.model, step.path)
    return _event(step, {**file, "contents": _contents(gguf_header.read(Path(file["path"])))}, reused=True)


def _event(step: ModelStep, fields: Mapping[str, Any], *, reused: bool) -> ModelEvent:
    from dgxlab.model.events import ModelEvent  # imported late: a probe, which imports this module, should be quick

    return ModelEvent(name=step.model, recipe=step.recipe, seconds=0.0, reused=reused, **fields)


def _contents(header: Header, **further: Any) -> Contents:
    """Return what a file holds; `further` has more of a model that was made here."""
    of_header = ("architecture", "parameters", "type", "bits", "per_token")
    nothing: dict[str, Any] = {"files": {}, "requantised": False, "fidelity": {}}
    return cast("Contents", {**{name: getattr(header, name) for name in of_header}, **nothing, **further})


def to_send(root: Root, model_ids: Sequence[str]) -> list[str]:
    """Return the ids of those synthetic models that the client must send.

    They are missing on this host, and its Python lacks gguf or numpy to write them.
    """
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
    """Store the f16 file of a synthetic model from a stream, for `make` to quantise.

    Raises RemoteError if the file is incomplete, or the disk is full.
    """
    with incoming(stream, sha256, root.models, f"model {model_id}") as file:
        settle(file, _sent(root, model_id))


def make(
    root: Root,
    step: ModelStep,
    model_id: str,
    launch: Launcher,
    *,
    source: ModelEvent | None = None,
    files: Mapping[str, str] | None = None,
) -> ModelEvent:
    """Make a model from its recipe unless it exists; return its event.

    Args:
        source: The finished model that it is quantised from; None for a synthetic model, which is written first.
        files: The ids that `files` returns.

    Raises:
        SpecError: if the source is damaged, or cannot be quantised as asked.
        RemoteError: if a program fails, or llama-quantize made other types than the recipe's.
    """
    root.models.mkdir(parents=True, exist_ok=True)
    path = root.models / f"{model_id}.gguf"
    record, sent = path.with_suffix(".json"), _sent(root, model_id)
    written, part = (path.with_name(f".{path.stem}{kind}-{me()}.gguf") for kind in ("-f16", ""))
    try:
        written.unlink(missing_ok=True)  # left by a killed agent with the same pid
        # link first, then check for the finished model: another job removes the sent file when it has finished
        with contextlib.suppress(FileNotFoundError):
            written.hardlink_to(sent)
        reused = _finished(path)
        if not reused:
            if not source and not written.exists():
                _write(root, step, written, launch)
            contents = _quantise(step, launch, source, written, part)
            facts = {"size": part.stat().st_size, "digest": f"sha256:{sha256(part)}", "contents": contents}
            settle(part, path)
            part.write_text(json.dumps(facts))
            settle(part, record)
        sent.unlink(missing_ok=True)
    finally:
        written.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    record.touch()  # its last use, for `host clean`
    fields: dict[str, Any] = {"model_id": model_id, "path": str(path), **json.loads(record.read_text())}
    if "contents" in fields:  # an older agent's record has none; two jobs may have the same files at different paths
        fields["contents"]["files"] = files or {}
    return _event(step, fields, reused=reused)


def _quantise(step: ModelStep, launch: Launcher, source: ModelEvent | None, written: Path, part: Path) -> Contents:
    """Make `part` from the source, or from what was written; return what it holds."""
    from dgxlab import gguf_header, quantise  # imported late, as Objects
    from dgxlab.quantise.fidelity import fidelity

    if not step.quantize:
        written.rename(part)
        return _contents(gguf_header.read(part))
    assert step.recipe
    how, origin = quantisation(step.recipe), Path(source.path) if source else written
    before = gguf_header.read(origin)
    quantise.check_source(how, before)
    paths = {"{in}": origin, "{out}": part, "{imatrix}": Path(how.imatrix).expanduser()}
    _launch(step, launch, "quantize", step.quantize, paths)
    after = gguf_header.read(part)
    quantise.check_types(how, before, after)
    again = how.quant not in quantise.FLOATS and any(quantise.is_quantised(tensor.type) for tensor in before.tensors)
    inherited = bool(source and source.contents and source.contents["requantised"])
    return _contents(after, requantised=again or inherited, fidelity=fidelity(origin, before, part, after))


def _finished(path: Path) -> bool:
    """Return whether a model and its record both exist; each is renamed into place when complete."""
    try:
        return bool(path.stat().st_size == json.loads(path.with_suffix(".json").read_text())["size"])
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _sent(root: Root, model_id: str) -> Path:
    """Return the path of a model's f16 file between its arrival and the job that quantises it."""
    return root.models / f"{model_id}-f16.gguf"


def _write(root: Root, step: ModelStep, out: Path, launch: Launcher) -> None:
    """Write the f16 file; the vocabulary of the recipe's pin is beside it meanwhile."""
    from dgxlab.agent.objects import Objects  # imported late: a probe, which imports this module, should be quick
    from dgxlab.synth import vocabulary_path

    recipe, vocabulary = step.recipe, out.with_suffix(".vocab")
    try:
        if isinstance(recipe, SyntheticModel) and recipe.vocab:
            Objects(root.objects).copy(recipe.vocab_pin, vocabulary_path(recipe), vocabulary)
        _launch(step, launch, "write", step.make, {"{out}": out, "{vocab}": vocabulary})
    finally:
        vocabulary.unlink(missing_ok=True)


def _launch(step: ModelStep, launch: Launcher, doing: str, argv: Sequence[str], paths: Mapping[str, Path]) -> None:
    launched = launch(f"{step.id}-{doing}", [str(paths.get(arg, arg)) for arg in argv])
    if not launched.ended.ok:
        message = f"the model was not made: {launched.failure(Path(argv[0]).name, step.limit_s)}"
        raise RemoteError(message, next=f"dgxlab logs {launched.stderr.parent.parent.name} raw/{launched.stderr.name}")
