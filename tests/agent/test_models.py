"""Synthetic models on the host: made there or sent, once, whatever other jobs do."""

from __future__ import annotations

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
from dgxlab.agent.measure import Launch
from dgxlab.errors import RemoteError
from dgxlab.model import DerivedModel, ModelStep, SyntheticModel
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
Launcher = Callable[[str, Sequence[str]], Launch]


@pytest.fixture(autouse=True)
def sent(root: Root) -> None:
    models.receive(root, NAME, DIGEST, io.BytesIO(F16))


@pytest.fixture
def launch(tmp_path: Path) -> Launcher:
    out, err, env = tmp_path / "out", tmp_path / "err", {"PATH": os.environ["PATH"]}
    return lambda name, argv: Launch(child.run(argv, env=env, stdout=out, stderr=err, limit_s=10), out, err)


@pytest.fixture
def make(root: Root, launch: Launcher) -> Callable[..., ModelEvent]:
    path = root.models / f"{NAME}.gguf"
    return lambda step=STEP, launch=launch: models.synthesize(root, step, NAME, path, launch)


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


def test_another_type_than_was_asked_for(root: Root, make: Callable[..., ModelEvent]) -> None:
    """llama-quantize falls back in silence; cp keeps F16 for sure."""
    with pytest.raises(RemoteError, match=r"did not make Q4_0: token_embd\.weight is F16"):
        make(replace(STEP, recipe=replace(RECIPE, quant="Q4_0")))
    assert [path.read_bytes() for path in root.models.iterdir()] == [F16]


def test_two_jobs_and_one_model(root: Root, make: Callable[..., ModelEvent], launch: Launcher) -> None:
    """One finishes it while the other has just begun: neither has to write it."""
    others: list[ModelEvent] = []

    def slowly(name: str, argv: Sequence[str]) -> Launch:
        written, shelf = Path(argv[1]), root.path / "shelf"
        shutil.move(written, shelf)  # the other job of this one process would take its name
        others.append(make())
        shutil.move(shelf, written)
        return launch(name, argv)

    assert [make(launch=slowly)] == others
    assert names(root) == [f"{NAME}.gguf", f"{NAME}.json"]


def test_neither_sent_nor_written(root: Root, launch: Launcher) -> None:
    with pytest.raises(RemoteError, match="not made: false"):
        models.synthesize(root, STEP, "synthetic-2", root.models / "synthetic-2.gguf", launch)


def test_a_derived_model_is_made_from_the_finished_one(root: Root, launch: Launcher, tmp_path: Path) -> None:
    source, path = tmp_path / "source.gguf", root.models / "synthetic-2.gguf"
    source.write_bytes(F16)
    step = replace(STEP, recipe=DerivedModel(RECIPE, "F16"), make=(), of="m")
    event = models.synthesize(root, step, "synthetic-2", path, launch, source=source)
    assert path.read_bytes() == source.read_bytes() == F16
    assert event.recipe == step.recipe


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
