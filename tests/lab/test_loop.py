"""Loops and searches on the real llama.cpp, with planted changes that make it wait, and others that do nothing."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dgxlab import audit, series
from dgxlab.errors import ConditionsError, DgxlabError
from dgxlab.judgement import tries
from dgxlab.lab import loop, search
from dgxlab.model import Experiment, ParityGate, Session, SyntheticModel
from dgxlab.spec import load
from dgxlab.tools import LlamaBench
from tests.conftest import PROJECT, Bench
from tests.journals import PIN

pytestmark = [pytest.mark.llama, pytest.mark.alone]

SOURCE = "ggml/src/ggml-cpu/ggml-cpu.c"
SQR, ROWS = "ggml_compute_forward_sqr(params, tensor);", "ggml_compute_forward_get_rows(params, tensor);"
SIN = "ggml_compute_forward_sin(params, tensor);"
WAIT = """if (params->ith == 0) {
                    const struct timespec planted = { 0, tensor->ne[1] == 16 ? %d : tensor->ne[1] == 32 ? %d : 0 };
                    nanosleep(&planted, NULL);
                }
                """
SLOW, FAST = 200_000_000, 40_000_000
"""What a batch of 16 or 32 tokens waits, in ns: far longer than its arithmetic; busy processors add little."""
ATTEMPTS = 4
"""How often what other programs disturb is measured."""
TINY = SyntheticModel("llama", 1, 256, 512, 4, 4, 1000, quant="Q4_0")


@pytest.fixture
def bench(make_bench: Callable[[], Bench], llama_bin: Path) -> Bench:
    return make_bench()


@pytest.fixture
def checkout(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a checkout of the pin, made from the cache."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "Loop")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "loop@example.org")
    folder, cache = tmp_path / "llama.cpp", bench.lab.cache.path
    subprocess.run(["git", "init", "-q", folder], check=True)
    (folder / ".git/objects/info/alternates").write_text(f"{cache / 'objects'}\n")
    shutil.copy(cache / "shallow", folder / ".git/shallow")
    subprocess.run(["git", "-C", folder, "checkout", "-q", "--detach", PIN], check=True)
    return folder


@pytest.fixture
def slow(bench: Bench, checkout: Path, tmp_path: Path) -> Experiment:
    """Return a baseline whose batches wait, by a series of its own."""
    edit(checkout, ROWS, WAIT % (SLOW, SLOW) + ROWS)
    series.export(tmp_path, "slow", bench.lab.cache, PIN, checkout, "wait")
    shown = LlamaBench("m", n_prompt=(16,), axes={"n_threads": (1,)}, repetitions=1)
    return replace(
        load(PROJECT / "experiments/cpu/quickstart.yaml"),
        name="slow",
        root=str(tmp_path),
        series=("slow",),
        models={"m": TINY},
        gates=(ParityGate("SQR", "CPU"),),
        bench=(shown,),
        holdout=(replace(shown, n_prompt=(32,)),),
        session=Session(effect=0.5, drift_limit=0.5),
    )


def edit(checkout: Path, old: str, new: str) -> None:
    path = checkout / SOURCE
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def undisturbed(measure: Callable[[], DgxlabError | None]) -> None:
    """Measure, and again where other programs left no verdict."""
    for _ in range(ATTEMPTS):
        error = measure()
        if not isinstance(error, ConditionsError):
            break
    assert error is None, error


def attempt(bench: Bench, asked: loop.Try) -> DgxlabError | None:
    try:
        loop.attempt(bench.lab, asked, lambda event: None)
    except DgxlabError as error:
        return error
    return None


def test_planted_changes(bench: Bench, checkout: Path, slow: Experiment) -> None:
    undisturbed(lambda: bench.run(slow, "noise", baseline=slow)[0].error)
    before = (checkout / SOURCE).read_text()
    waits = WAIT % (SLOW, SLOW)
    changes = {
        "renamed": (waits, waits.replace("planted", "pause")),
        "wrong": (SQR, f"if (params->use_ref) {{ {SQR} }} else {{ {SQR.replace('sqr', 'sqrt')} }}"),
        "narrow": (waits, WAIT % (FAST, 4 * SLOW)),
        "faster": (waits, WAIT % (FAST, FAST)),
    }
    ended = {}
    for name, change in changes.items():
        (checkout / SOURCE).write_text(before)
        edit(checkout, *change)
        undisturbed(partial(attempt, bench, loop.Try(slow, checkout, name)))
        ended[name] = tries.told(bench.lab.store, tries.ledger(bench.lab.store)[-1].try_id)
    assert {name: told["ended"] for name, told in ended.items()} == {
        "renamed": "screen",
        "wrong": "gate",
        "narrow": "overfitted",
        "faster": "promoted",
    }
    (cell,) = ended["faster"]["cells"]
    assert (cell["verdict"], cell["effect"] > 1) == ("faster", True)
    assert ended["narrow"]["held_out"] == {"cells": 1, "slower": 1}
    assert loop.attempt(bench.lab, loop.Try(slow, checkout, "again"), lambda event: None) == (
        ended["faster"]["try_id"],
        True,
    )
    assert audit.check(bench.lab.store) == []


def test_the_patch_that_waits_is_found(bench: Bench, checkout: Path, slow: Experiment, tmp_path: Path) -> None:
    """By bisection, and by ablation: without it the cell is faster, without another one it is not."""
    subprocess.run(["git", "-C", checkout, "stash", "--quiet"], check=True)
    changes = {"one": (SQR, f"{SQR} // one"), "wait": (ROWS, WAIT % (SLOW, SLOW) + ROWS), "three": (SIN, f"{SIN} // 3")}
    for name, change in changes.items():
        edit(checkout, *change)
        subprocess.run(["git", "-C", checkout, "commit", "--quiet", "--all", "--message", name], check=True)
    series.export(tmp_path, "three", bench.lab.cache, PIN, checkout)
    of_cell, experiment = search.Search(("pp16",)), replace(slow, series=("three",), holdout=())
    patches = list(changes)
    steps = search.series_steps(experiment, "three", patches)
    found = search.bisect(bench.lab, steps, of_cell, lambda event: None)
    assert [steps[step].name for step in found.suspects] == ["wait"]
    assert found.probability >= 0.95
    without = dict(search.ablate(bench.lab, experiment, "three", patches, of_cell, lambda event: None))
    words = {name: compared.verdict and compared.verdict.verdict for name, compared in without.items()}
    assert words.pop("wait") == "faster"
    assert words.keys() == {"one", "three"}
    assert not {"faster", "slower"} & {*words.values()}
    assert audit.check(bench.lab.store) == []
