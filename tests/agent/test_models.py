"""Synthetic models on the host: made there or sent, once, whatever other jobs do."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dgxlab.agent import child, models
from dgxlab.agent.environment import Root
from dgxlab.agent.measure import Launch
from dgxlab.errors import RemoteError
from dgxlab.model import DerivedModel, ModelStep, SyntheticModel

NAME = "synthetic-1"
F16 = b"GGUF f16"
STEP = ModelStep("model:m", "arm", "m", "", SyntheticModel(), ("false",), ("cp", "{in}", "{out}"))
"""Its `make` fails, as on a host without gguf; cp is the quantiser."""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A root that was sent the model."""
    holder = Root(tmp_path / "root")
    holder.create()
    models.receive(holder, NAME, hashlib.sha256(F16).hexdigest(), io.BytesIO(F16))
    return holder


@pytest.fixture
def launch(tmp_path: Path) -> Callable[[str, Sequence[str]], Launch]:
    """Run what a step says."""
    out, err = tmp_path / "out", tmp_path / "err"

    def run(name: str, argv: Sequence[str]) -> Launch:
        return Launch(child.run(argv, env={"PATH": os.environ["PATH"]}, stdout=out, stderr=err, limit_s=10), out, err)

    return run


def test_what_was_sent_is_quantised_and_gone(root: Root, launch: Callable[[str, Sequence[str]], Launch]) -> None:
    """The model and its record are all that is left, and nothing is asked for again."""
    path = root.models / f"{NAME}.gguf"
    assert models.to_send(root, [NAME]) == []
    event = models.synthesize(root, STEP, NAME, path, launch)
    assert (event.reused, event.digest) == (False, f"sha256:{hashlib.sha256(F16).hexdigest()}")
    assert sorted(path.name for path in root.models.iterdir()) == [f"{NAME}.gguf", f"{NAME}.json"]
    assert models.synthesize(root, STEP, NAME, path, launch).reused


def test_a_quantiser_that_fails_does_not_use_it_up(root: Root, launch: Callable[[str, Sequence[str]], Launch]) -> None:
    """The next job has it still: it may have taken an hour to send."""
    broken = ModelStep(**{**vars(STEP), "quantize": ("false",)})
    with pytest.raises(RemoteError, match="the synthetic model was not made: false ended with exit status 1"):
        models.synthesize(root, broken, NAME, root.models / f"{NAME}.gguf", launch)
    assert [path.read_bytes() for path in root.models.iterdir()] == [F16]
    assert models.to_send(root, [NAME]) == []
    assert models.synthesize(root, STEP, NAME, root.models / f"{NAME}.gguf", launch).size == len(F16)


def test_two_jobs_and_one_model(root: Root, launch: Callable[[str, Sequence[str]], Launch]) -> None:
    """One is done with it while the other has just begun: neither has to make it."""
    path = root.models / f"{NAME}.gguf"
    others: list[dict[str, object]] = []

    def slowly(name: str, argv: Sequence[str]) -> Launch:
        written, shelf = Path(argv[1]), root.path / "shelf"
        shutil.move(written, shelf)  # the other job of this one process would take its name
        others.append(models.synthesize(root, STEP, NAME, path, launch))
        shutil.move(shelf, written)
        return launch(name, argv)

    mine = models.synthesize(root, STEP, NAME, path, slowly)
    assert mine == others[0]
    assert sorted(path.name for path in root.models.iterdir()) == [f"{NAME}.gguf", f"{NAME}.json"]


def test_neither_sent_nor_at_hand(root: Root, launch: Callable[[str, Sequence[str]], Launch]) -> None:
    """A host that was believed to have gguf says what failed."""
    with pytest.raises(RemoteError, match="the synthetic model was not made: false ended"):
        models.synthesize(root, STEP, "synthetic-2", root.models / "synthetic-2.gguf", launch)


def test_a_derived_model_is_made_from_the_finished_one(
    root: Root, launch: Callable[[str, Sequence[str]], Launch], tmp_path: Path
) -> None:
    """Nothing is written for it, and the model that it is made from stays."""
    source = tmp_path / "source.gguf"
    source.write_bytes(b"GGUF quantised")
    step = ModelStep("model:d", "arm", "d", "", DerivedModel(SyntheticModel(), "F32"), (), STEP.quantize, of="m")
    path = root.models / "synthetic-2.gguf"
    event = models.synthesize(root, step, "synthetic-2", path, launch, source=source)
    assert path.read_bytes() == source.read_bytes() == b"GGUF quantised"
    assert event.recipe.source.arch == "llama"


@pytest.mark.parametrize("suffix", [".json", ".gguf"])
def test_half_a_model_is_made_again(root: Root, launch: Callable[[str, Sequence[str]], Launch], suffix: str) -> None:
    """A power loss left of the model or of its record the name alone: it is asked for, and made."""
    path = root.models / f"{NAME}.gguf"
    models.synthesize(root, STEP, NAME, path, launch)
    path.with_suffix(suffix).write_bytes(b"")
    models.receive(root, NAME, hashlib.sha256(F16).hexdigest(), io.BytesIO(F16))
    event = models.synthesize(root, STEP, NAME, path, launch)
    assert (event.reused, path.read_bytes()) == (False, F16)
    assert models.synthesize(root, STEP, NAME, path, launch).reused
