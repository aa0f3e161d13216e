"""Synthetic models on the host: made there or sent, once, whatever other jobs do."""

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dgxlab import synth
from dgxlab.agent import child, models
from dgxlab.agent.environment import Root
from dgxlab.agent.measure import Launched
from dgxlab.errors import RemoteError, SpecError
from dgxlab.model import DerivedModel, FileModel, ModelStep, SyntheticModel, model_id
from dgxlab.model.events import ModelEvent

NAME = "synthetic-1"
RECIPE = SyntheticModel(n_layer=1, n_embd=32, n_ff=32, n_vocab=8, n_head=1, n_head_kv=1, quant="F16")
STEP = ModelStep("model:m", "arm", "m", "", RECIPE, ("false",), ("cp", "{in}", "{out}"))
"""Its `make` fails, as on a host without gguf; cp is the quantiser."""


def f16() -> bytes:
    with TemporaryDirectory() as folder:
        synth.write(RECIPE, Path(folder, "f16.gguf"))
        return Path(folder, "f16.gguf").read_bytes()


F16 = f16()
DIGEST = hashlib.sha256(F16).hexdigest()
Launcher = Callable[[str, Sequence[str]], Launched]


@pytest.fixture(autouse=True)
def sent(root: Root) -> None:
    models.receive(root, NAME, DIGEST, io.BytesIO(F16))


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    out, err, env = tmp_path / "out", tmp_path / "err", {"PATH": os.environ["PATH"]}
    return lambda name, argv: Launched(child.run(argv, env=env, stdout=out, stderr=err, limit_s=10), out, err)


@pytest.fixture
def make(root: Root, launch: Launcher) -> Callable[..., ModelEvent]:
    return lambda step=STEP, launch=launch: models.make(root, step, NAME, launch)


def names(root: Root) -> list[str]:
    return sorted(path.name for path in root.models.iterdir())


def test_a_sent_model_is_quantised_and_removed(root: Root, make: Callable[..., ModelEvent]) -> None:
    assert models.to_send(root, [NAME]) == []
    event = make()
    assert (event.reused, event.digest) == (False, f"sha256:{DIGEST}")
    assert names(root) == [f"{NAME}.gguf", f"{NAME}.json"]
    assert make().reused


def test_a_quantiser_that_fails_does_not_use_it_up(root: Root, make: Callable[..., ModelEvent]) -> None:
    with pytest.raises(RemoteError, match=r"not made: false .* status 1"):
        make(replace(STEP, quantize=("false",)))
    assert [path.read_bytes() for path in root.models.iterdir()] == [F16]
    assert models.to_send(root, [NAME]) == []
    assert make().size == len(F16)


def test_a_quantiser_that_hangs(make: Callable[..., ModelEvent], tmp_path: Path) -> None:
    def launch(name: str, argv: Sequence[str]) -> Launched:
        out, err, limit_s = tmp_path / "out", tmp_path / "err", hangs.limit_s
        return Launched(child.run(argv, env=os.environ, stdout=out, stderr=err, limit_s=limit_s), out, err)

    hangs = replace(STEP, quantize=("sleep", "60"), limit_s=0.2)
    with pytest.raises(RemoteError, match=r"not made: sleep ran past its limit of 0\.2 s"):
        make(hangs, launch)


def test_another_type_than_was_asked_for(root: Root, make: Callable[..., ModelEvent]) -> None:
    """llama-quantize falls back in silence; cp keeps F16 for sure."""
    with pytest.raises(RemoteError, match=r"did not make Q4_0: token_embd\.weight is F16"):
        make(replace(STEP, recipe=replace(RECIPE, quant="Q4_0")))
    assert [path.read_bytes() for path in root.models.iterdir()] == [F16]


def test_two_jobs_and_one_model(root: Root, make: Callable[..., ModelEvent], launch: Launcher) -> None:
    """One finishes it while the other has just begun: neither has to write it."""
    others: list[ModelEvent] = []

    def slowly(name: str, argv: Sequence[str]) -> Launched:
        written, shelf = Path(argv[1]), root.path / "shelf"
        shutil.move(written, shelf)  # the other job of this one process would take its name
        others.append(make())
        shutil.move(shelf, written)
        return launch(name, argv)

    assert [make(launch=slowly)] == others
    assert names(root) == [f"{NAME}.gguf", f"{NAME}.json"]


def test_neither_sent_nor_written(root: Root, launch: Launcher) -> None:
    with pytest.raises(RemoteError, match="not made: false"):
        models.make(root, STEP, "synthetic-2", launch)


def derive(root: Root, launch: Launcher, source: bytes = F16, **changes: object) -> ModelEvent:
    file = root.path / "source.gguf"
    file.write_bytes(source)
    how = DerivedModel(FileModel(str(file)), **{"quant": "F16", **changes})  # type: ignore[arg-type]
    step = replace(STEP, recipe=how, make=(), of="m")
    origin, files = models.find(root, ModelStep("model:f", "arm", "f", str(file))), models.files(root, step)
    return models.make(root, step, model_id(how, files), launch, source=origin, files=files)


def test_a_derived_model_is_made_from_the_finished_one_and_known_by_its_content(root: Root, launch: Launcher) -> None:
    event = derive(root, launch)
    assert Path(event.path).read_bytes() == F16
    assert event.model_id.startswith("derived-")
    assert (
        event.contents
        == {
            "architecture": "llama",
            "parameters": sum(tensor.size for tensor in synth.tensors(RECIPE)),
            "type": "F16",
            "bits": pytest.approx(16.1, abs=0.1),
            "per_token": 15232,  # two bytes a weight of a product, four of a norm
            "files": {str(root.path / "source.gguf"): f"file-{DIGEST[:16]}"},
            "requantised": False,
            "fidelity": {},  # no tensor has another type
        }
    )
    (root.path / "moved").mkdir()
    shutil.move(root.path / "source.gguf", root.path / "moved")
    assert derive(Root(root.path), launch).model_id == event.model_id


def test_a_source_that_cannot_be_quantised_as_asked(root: Root, launch: Launcher) -> None:
    with pytest.raises(SpecError, match="MXFP4_MOE is for experts"):
        derive(root, launch, quant="MXFP4_MOE")
    with pytest.raises(SpecError, match="IQ1_S needs an"):
        derive(root, launch, quant="IQ1_S")
    with pytest.raises(SpecError, match=r"no whole GGUF file: tensor .* ends at byte"):
        derive(root, launch, F16[:-100])
    with pytest.raises(SpecError, match=r"no file /none/imatrix"):
        derive(root, launch, quant="IQ1_S", imatrix="/none/imatrix")
    assert [path.name for path in root.models.iterdir()] == [f"{NAME}-f16.gguf"]


def test_a_file_is_read_once_and_known_by_what_is_in_it(root: Root, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(b"1")
    seen = [models.identify(root, str(file)), models.identify(root, str(file), read=True)]
    assert [(each or {})["model_id"] for each in seen] == ["unread", f"file-{hashlib.sha256(b'1').hexdigest()[:16]}"]
    assert models.identify(root, str(file)) == seen[1]
    file.rename(tmp_path / "n.gguf")
    assert (models.identify(root, str(tmp_path / "n.gguf")) or {})["digest"] == (seen[1] or {})["digest"]
    (tmp_path / "n.gguf").write_bytes(b"22")
    assert models.identify(root, str(tmp_path / "n.gguf")) == {
        "model_id": "unread",
        "digest": "unread",
        "path": str(tmp_path / "n.gguf"),
        "size": 2,
    }
    assert models.identify(root, str(tmp_path / "none")) is None


@pytest.mark.parametrize("suffix", [".json", ".gguf"])
def test_a_model_that_a_power_loss_emptied_is_made_again(
    root: Root, make: Callable[..., ModelEvent], suffix: str
) -> None:
    make()
    (root.models / NAME).with_suffix(suffix).write_bytes(b"")
    models.receive(root, NAME, DIGEST, io.BytesIO(F16))
    event = make()
    assert (event.reused, (root.models / f"{NAME}.gguf").read_bytes()) == (False, F16)
    assert make().reused
