"""A host with git, a compiler and Python, and nothing else: what it lacks is sent, once.

A real sshd whose PATH is a folder of links to this machine's programs, less cmake and ninja, and a Python of its own
without packages.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgxlab import synth
from dgxlab.errors import BuildFailed, SpecError
from dgxlab.lab import provision
from dgxlab.model import Experiment, SyntheticModel, model_id
from dgxlab.spec import load
from dgxlab.tools import LlamaBench
from dgxlab.transport.host import Host, Probe
from dgxlab.transport.local import LocalTransport
from dgxlab.transport.ssh import SshTransport
from tests import toy
from tests.conftest import PROJECT, Bench
from tests.lab.conftest import ToyLab, kinds, notes
from tests.proxy import Proxy
from tests.sshd import make_key, sshd

LACKING = re.compile(r"(cmake|ctest|cpack|ninja|nvcc).*")  # programs that a bare host does not have

RECIPE = SyntheticModel(n_embd=128, n_ff=256, n_head=2, n_head_kv=2, n_vocab=8000, quant="F16")
"""5 MB; the toy does not read it, and nothing quantises it."""


@pytest.fixture(scope="session")
def bare_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with everything that is on a plain machine's PATH, less the build tools."""
    folder = tmp_path_factory.mktemp("bare") / "bin"
    folder.mkdir()
    folders = [Path(name) for name in os.environ["PATH"].split(":")]
    for program in (program for folder in folders if folder.is_dir() for program in folder.iterdir()):
        if not LACKING.fullmatch(program.name) and not (folder / program.name).is_symlink():
            (folder / program.name).symlink_to(program)
    return folder


@pytest.fixture(scope="session")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("python") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return str(folder / "bin" / "python3")


Box = Callable[..., AbstractContextManager[tuple[ToyLab, Proxy]]]


@pytest.fixture
def box(make_toy_lab: Callable[..., ToyLab], tmp_path: Path, bare_python: str) -> Box:
    @contextmanager
    def make(path: Path | None = None) -> Iterator[tuple[ToyLab, Proxy]]:
        key = tmp_path / "home" / ".ssh" / "id_ed25519"
        key.parent.mkdir(mode=0o700)
        (tmp_path / "authorized_keys").write_text(make_key(key))
        config = f"SetEnv HOME={tmp_path}/box/home DGXLAB_LOCKS={tmp_path}/box/locks PATH={path}\n" if path else ""
        with sshd(tmp_path / "box", tmp_path / "authorized_keys", config=config) as server, Proxy(server.port) as proxy:
            (key.parent / "known_hosts").write_text(f"{server.known_hosts_line(name='box')}\n")
            config = f"Host box\n  HostName 127.0.0.1\n  Port {proxy.port}\n  HostKeyAlias box\n"
            (key.parent / "config").write_text(config)
            lab = make_toy_lab(root=tmp_path / "root")
            transport = SshTransport("box", "box", str(tmp_path / "root"), bare_python)
            lab.host = host = Host(transport)
            lab.lab = replace(lab.lab, connect=lambda name: host)
            try:
                yield lab, proxy
            finally:
                transport.close()

    return make


def synthetic(lab: ToyLab) -> Experiment:
    return lab.experiment(models={"m": RECIPE}, gates=(), bench=(toy.llama_bench(),))


def f16(lab: ToyLab) -> Path:
    return lab.root / "models" / f"{model_id(RECIPE)}.gguf"


@pytest.mark.network
def test_build_tools_are_sent_once(bare_path: Path, box: Box) -> None:
    with box(bare_path) as (lab, _):
        outcome, events = lab.run_well()
        sent = notes(events, "which has none")
        assert [note.split(",")[0] for note in sent] == ["sending cmake 3.31.10", "sending ninja 1.11.1.4"]
        assert all("MiB" in note or "KiB" in note for note in sent)
        (build,) = kinds(events, "build")
        assert build["toolchain"]["cmake"] == "cmake version 3.31.10"
        assert len(lab.values()) == 8
        calls = lab.host.calls
        outcome, events = lab.run()
        assert (outcome.job_id, outcome.reused, events) == ("", 8, [])
        assert lab.host.calls == calls + 1
        assert sorted(path.name for path in (lab.root / "tools").iterdir()) == ["cmake-3.31.10", "ninja-1.11.1.4"]


def test_build_tools_that_cannot_be_had(bare_path: Path, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with box(bare_path) as (lab, _):
        with pytest.raises(SpecError, match=r"has no cmake, .*: pip finds") as e:
            lab.run()
        assert e.value.next == "sudo apt-get install cmake ninja-build"
        assert lab.lab.store.unfinished("box") == []


@pytest.mark.parametrize(
    ("lacking", "cmake", "what"),
    [
        ("tools", {}, "there is no git on host local"),
        ("cxx", {}, "there is no C++ compiler on host local"),
        ("gpus", {"GGML_CUDA": "ON"}, "there is no NVIDIA GPU on host local, which GGML_CUDA needs"),
    ],
)
def test_what_cannot_be_sent_is_missed_first(
    toy_lab: ToyLab, monkeypatch: pytest.MonkeyPatch, lacking: str, cmake: dict[str, str], what: str
) -> None:
    ask = Host.probe

    def bare(host: Host, *args: Any, **options: Any) -> Probe:
        probe = ask(host, *args, **options)
        facts = probe.facts
        if lacking == "cxx":
            return replace(probe, facts=replace(facts, toolchain=replace(facts.toolchain, cxx="")))
        without = {"gpus": []} if lacking == "gpus" else {"tools": dict.fromkeys(facts.details["tools"], "")}
        return replace(probe, facts=replace(facts, details={**facts.details, **without}))

    monkeypatch.setattr(Host, "probe", bare)
    with pytest.raises(BuildFailed) as caught:
        toy_lab.run(toy_lab.experiment(cmake=cmake))
    assert caught.value.message == what
    assert toy_lab.lab.store.jobs() == []


def test_a_model_made_here_is_the_one_made_there(make_toy_lab: Callable[..., ToyLab], bare_python: str) -> None:
    bare = make_toy_lab("bare", bare_python)
    _, events = bare.run_well(synthetic(bare))
    (note,) = notes(events, "making model m")
    assert "4.53 MiB" in note
    percents = [event["done"] for event in kinds(events, "progress") if event["id"] == "sending"]
    assert percents == sorted(set(percents))
    assert percents[-1] == 100
    (sent,) = kinds(events, "model")
    content = f16(bare).read_bytes()
    assert {path.suffix for path in f16(bare).parent.glob(f"*{model_id(RECIPE)}*")} == {".gguf", ".json"}
    assert not list(f16(bare).parent.glob(".*"))
    _, events = bare.run(synthetic(bare), again=True)
    assert notes(events, "making") == []
    assert [model["reused"] for model in kinds(events, "model")] == [True]

    f16(bare).unlink()
    full = make_toy_lab("full")
    _, events = full.run(synthetic(full))
    assert notes(events, "making") == []
    (model,) = kinds(events, "model")
    assert f16(full).read_bytes() == content
    assert {k: model[k] for k in ("model_id", "size", "digest", "recipe")} == {
        k: sent[k] for k in ("model_id", "size", "digest", "recipe")
    }
    f16(full).unlink()


def test_a_model_sent_before_its_client_died(make_toy_lab: Callable[..., ToyLab], bare_python: str) -> None:
    lab = make_toy_lab(python=bare_python)
    synth.write(RECIPE, lab.folder / "f16.gguf")
    content = (lab.folder / "f16.gguf").read_bytes()
    lab.host.send_model(model_id(RECIPE), provision.sha256(lab.folder / "f16.gguf"), lambda: [content])
    outcome, events = lab.run(synthetic(lab))
    assert (outcome.error, notes(events, "making")) == (None, [])
    assert f16(lab).read_bytes() == content
    f16(lab).unlink()


def test_a_cut_on_the_way_begins_anew(tmp_path: Path, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provision, "NOTE_S", -1.0)
    with box() as (lab, proxy):
        cuts = []

        def react(event: dict[str, Any]) -> None:
            if event.get("id") == "sending" and event["done"] > 30 and not cuts:
                cuts.append(event)
                proxy.cut()

        _, events = lab.run_well(synthetic(lab), react=react)
        assert len(notes(events, "trying again in 1 s")) == 1
        assert [note for note in notes(events, "sent ") if note.startswith("sent 1.00 MiB of 4.54 MiB, ")]
        synth.write(RECIPE, tmp_path / "f16.gguf")
        assert f16(lab).read_bytes() == (tmp_path / "f16.gguf").read_bytes()


@pytest.mark.llama
def test_the_real_quantiser_takes_what_was_sent(make_bench: Callable[[], Bench], bare_python: str) -> None:
    recipe = replace(RECIPE, quant="Q4_0", seed=7)
    shipped = load(PROJECT / "experiments" / "cpu" / "quickstart.yaml")
    entry = next(entry for entry in shipped.bench if isinstance(entry, LlamaBench))
    experiment = replace(shipped, models={"small": recipe}, gates=(), bench=(entry,))
    digests = []
    for python in (bare_python, sys.executable):
        bench = make_bench()
        host = Host(LocalTransport(str(bench.root), python=python))
        for left in bench.root.glob(f"models/{model_id(recipe)}.*"):
            left.unlink()
        outcome, events = Bench(replace(bench.lab, connect=lambda name, host=host: host), bench.root).run(experiment)
        assert outcome.error is None
        assert bool(notes(events, "making model small")) == (python == bare_python)
        assert {run["status"] for run in kinds(events, "run")} == {"valid"}
        (model,) = kinds(events, "model")
        digests.append((model["model_id"], model["digest"]))
    assert digests[0] == digests[1]
