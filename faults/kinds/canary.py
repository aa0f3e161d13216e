"""Hostile strings, which run a program if a shell reads them, in everything that reaches a host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from dgxlab.errors import DgxlabError, SpecError
from dgxlab.model import Experiment, Plan, Source
from dgxlab.plan import make
from dgxlab.source import PinCache
from dgxlab.spec import load
from dgxlab.transport.host import Host
from faults.fault import Broken, Fault
from faults.host import BENCH, Box, box
from faults.hostile import Canary, ShellTransport, canary
from tests.spec.specs import PIN

SHELLS = tuple(filter(None, map(shutil.which, ("sh", "bash", "dash"))))
STUBS = ("dgxlab", "ls", "cat", "head", "sed", "df", "rm", "ssh", "vi", "fuser", "zcat", "git", "sudo", "uptime")
"""Programs that the next command of an error may name; here they do nothing."""

Spec = dict[str, Any]


@dataclass(frozen=True)
class Cage:
    """A canary, a host over ssh, and a folder for other files.

    Attributes:
        model: A file that can be measured.
    """

    there: Box
    canary: Canary
    folder: Path

    @property
    def home(self) -> Path:
        """The home folder for logins without a network."""
        return self.folder / "home"

    @property
    def model(self) -> str:
        """A model file."""
        return str(self.there.there.here.project / "toy.gguf")


@contextmanager
def cage() -> Iterator[Cage]:
    """Yield a host with a canary."""
    before = Path.cwd()
    with box() as there:
        folder = there.there.here.folder / "cage"
        for part in ("home", "stubs", "specs/patches"):
            (folder / part).mkdir(parents=True)
        for name in STUBS:
            stub = folder / "stubs" / name
            stub.write_text("#!/bin/sh\n")
            stub.chmod(0o755)
        bird = canary(folder)
        shutil.copy(bird.program, folder / "stubs")
        os.chdir(folder / "specs")
        try:
            yield Cage(there, bird, folder)
        finally:
            os.chdir(before)


def trial(place: Cage, random: Random) -> str:
    """Put hostile strings in some fields, and check that no shell reads one."""
    way = random.choices((_on_the_line, _in_a_spec, _in_a_source, _for_real), (56, 36, 5, 3))[0]
    met = way(place, random)
    place.canary.check(way.__name__)
    return met


# -- on the command line that ssh carries ----------------------------------------------------------------------------


def _on_the_line(place: Cage, random: Random) -> str:
    """Ask the agent for something, with hostile words in the question or in what hosts.yaml says."""
    word = place.canary.word
    root = f"~/{word(random)}" if random.random() < 0.15 else "~/.dgxlab"
    python = word(random) if random.random() < 0.15 else sys.executable
    host = Host(ShellTransport(root, python, place.home, random.choice(SHELLS)))
    asked = random.choice(QUESTIONS)
    with suppress(DgxlabError, OSError):
        asked(host, word(random), random)
    place.canary.check((root, python))
    if root != "~/.dgxlab":
        for path in place.home.iterdir():
            if path.name != ".dgxlab":
                shutil.rmtree(path, ignore_errors=True)
    return "quoted"


def _submit(host: Host, word: str, random: Random) -> object:
    return host.submit(Plan(job_id=word, name=word, experiment=word, arms=(), steps=()))


QUESTIONS: Sequence[Callable[[Host, str, Random], object]] = (
    lambda host, word, random: host.status(word),
    lambda host, word, random: host.plan(word),
    lambda host, word, random: host.cancel(word),
    lambda host, word, random: host.raw(word, random.choice((0, 1 << 20)), len),
    lambda host, word, random: host.follow(word, 0, len),
    lambda host, word, random: host.probe([word], [word], [word]),
    lambda host, word, random: host.send_tool(word, word, word, lambda: [word.encode()]),
    lambda host, word, random: host.send_model(word, word, lambda: [word.encode()]),
    lambda host, word, random: host.send_objects(word, [word], lambda: [word.encode()]),
    _submit,
)


# -- in a spec -------------------------------------------------------------------------------------------------------


def _in_a_spec(place: Cage, random: Random) -> str:
    """Load a spec with hostile strings, and plan it; what an error tells to type must be safe to type."""
    path = Path(random.choice(("x", place.canary.word(random, "canary").replace("/", "_"))) + ".yaml")
    path.write_text(json.dumps(_spoiled(place, random)))
    try:
        experiment = load(path)
    except SpecError as error:
        _type(place, error.next)
        return "refused"
    finally:
        path.unlink()
    for step in _planned(experiment).steps:
        for argv in (getattr(step, name, ()) for name in ("configure", "compile", "argv", "make", "quantize")):
            if not all(isinstance(word, str) and "\0" not in word for word in argv):
                raise Broken(f"{step.id} has {argv!r}")
    return "planned"


def _planned(experiment: Experiment) -> Plan:
    source = Source(experiment.pin, experiment.pin, experiment.pin)
    return make(experiment, source, job_id="20261120-120301-x-3f2a9c")


def _type(place: Cage, command: str) -> None:
    """Type a command, where programs do nothing."""
    env = {"PATH": str(place.folder / "stubs"), "HOME": str(place.home), "EDITOR": "vi"}
    subprocess.run(["/bin/sh", "-c", command], env=env, capture_output=True, cwd=place.home, timeout=10, check=False)
    place.canary.check(command)


def _base(place: Cage) -> Spec:
    gate = {"op": "MUL_MAT", "backend": "CPU", "expect": "4/4", "unsupported": 1}
    return {
        "name": "caged",
        "llama_cpp": {"pin": PIN, "sources": ["https://example.org/x"]},
        "env": {},
        "cmake": {},
        "models": {"m": {"path": place.model}},
        "gates": [{"backend-ops": gate}],
        "bench": [
            *json.loads(json.dumps(BENCH)),
            {"backend-ops": {"op": "MUL_MAT", "backend": "CPU", "where": {"n": 8}}},
        ],
    }


def _spoiled(place: Cage, random: Random) -> Spec:
    """Return a spec with hostile strings in one to three of all places."""
    spec = _base(place)
    for _ in range(random.randint(1, 3)):
        random.choice((*REACHING, *FIELDS))(spec, place.canary.word(random))
    return spec


def _llama(spec: Spec) -> Spec:
    entry: Spec = spec["bench"][0]["llama-bench"]
    return entry


def _ops(spec: Spec) -> Spec:
    entry: Spec = spec["bench"][1]["backend-ops"]
    return entry


REACHING: Sequence[Callable[[Spec, str], object]] = (
    lambda spec, word: spec["env"].update(TOY_X=word),
    lambda spec, word: spec["cmake"].update(GGML_TOY=word),
    lambda spec, word: spec["cmake"].update(CMAKE_CUDA_ARCHITECTURES=word),
    lambda spec, word: spec["cmake"].update(CMAKE_BUILD_TYPE=word),
    lambda spec, word: spec["cmake"].update(CMAKE_C_FLAGS=word),
    lambda spec, word: spec["cmake"].update(CMAKE_SHARED_LINKER_FLAGS=word),
    lambda spec, word: spec["models"].update(m={"path": f"/{word}"}),
    lambda spec, word: spec["gates"][0]["backend-ops"].update(env={"TOY_Y": word}),
    lambda spec, word: spec["gates"].append({"engaged": {"stderr": word}}),
    lambda spec, word: _llama(spec).update(args=[word]),
    lambda spec, word: _llama(spec).update(env={"TOY_Z": word}),
    lambda spec, word: _ops(spec)["where"].update(type_a=word),
    lambda spec, word: _ops(spec)["where"].update(n=[8, word]),
    lambda spec, word: spec.update(hypothesis=word),
)
"""Set a field that may have any text to a hostile one."""

FIELDS: Sequence[Callable[[Spec, str], object]] = (
    *REACHING,
    lambda spec, word: spec.update(name=word),
    lambda spec, word: spec.update(host=word),
    lambda spec, word: spec.update(extends=word),
    lambda spec, word: spec.update(series=[word]),
    lambda spec, word: spec["llama_cpp"].update(pin=word),
    lambda spec, word: spec["llama_cpp"].update(sources=[word]),
    lambda spec, word: spec["env"].update({word: "1"}),
    lambda spec, word: spec["cmake"].update({word: "1"}),
    lambda spec, word: spec["models"].update({word: {"path": "/x"}}),
    lambda spec, word: spec["models"].update(m={"synthetic": {"arch": word}}),
    lambda spec, word: spec["models"].update(m={"synthetic": {"quant": word}}),
    lambda spec, word: spec["gates"][0]["backend-ops"].update(op=word),
    lambda spec, word: spec["gates"][0]["backend-ops"].update(backend=word),
    lambda spec, word: spec["gates"][0]["backend-ops"].update(expect=word),
    lambda spec, word: _llama(spec).update(model=word),
    lambda spec, word: _llama(spec).update(cpu_mask=word),
    lambda spec, word: _llama(spec).update(type_k=word),
    lambda spec, word: _llama(spec).update(exclude=[{"n_prompt": word}]),
    lambda spec, word: _ops(spec).update(op=word),
    lambda spec, word: _ops(spec).update(backend=word),
    lambda spec, word: _ops(spec)["where"].update({word: 1}),
    lambda spec, word: spec.update({word: 1}),
)


# -- in a source -----------------------------------------------------------------------------------------------------


def _in_a_source(place: Cage, random: Random) -> str:
    """Fetch from a hostile address, with the real git, as far as a spec may name it."""
    word = place.canary.word(random)
    form = random.choice(
        ("/{}", "/{}.git", "file:///{}", "./{}", "~/{}", "ssh://{}/x", "ssh://127.0.0.1:1/{}", "git://127.0.0.1:1/{}")
    )
    spec = _base(place)
    spec["llama_cpp"]["sources"] = [form.format(word)]
    Path("x.yaml").write_text(json.dumps(spec))
    try:
        experiment = load(Path("x.yaml"))
        PinCache(place.folder / "pins.git").ensure(experiment.pin, experiment.sources, lambda note: None)
    except SpecError as error:
        _type(place, error.next)
        return "refused"
    except DgxlabError as error:
        _type(place, error.next)
    return "fetched"


# -- the real program ------------------------------------------------------------------------------------------------


def _for_real(place: Cage, random: Random) -> str:
    """Run an experiment with hostile strings on a host, over ssh, whatever comes of it."""
    here = place.there.there.here
    word = place.canary.word
    name = f"c{random.randrange(1 << 40):x}"
    fields = _base(place)
    for _ in range(random.randint(1, 2)):
        random.choice(REACHING)(fields, word(random))
    fields["llama_cpp"] = json.loads(here.spec(name).read_text())["llama_cpp"]
    fields["name"] = name
    (here.project / f"{name}.yaml").write_text(json.dumps(fields))
    hosts = here.hosts
    known = hosts.read_text()
    if random.random() < 0.3:
        hosts.write_text(json.dumps({**json.loads(known), "box": _hostile_host(place, random)}))
    try:
        ran = place.there.run("run", f"{name}.yaml", "--host", "box", "--wait", "0")
    finally:
        hosts.write_text(known)
    place.canary.check(fields)
    _type(place, next((line[6:] for line in ran.err.splitlines() if line.startswith("next: ")), ""))
    return "refused" if ran.rc == 9 else "ran"


def _hostile_host(place: Cage, random: Random) -> Mapping[str, Any]:
    word = place.canary.word(random)
    field = random.choice(
        (
            {"ssh": word},
            {"root": f"~/{word}"},
            {"python": word},
            {"path_prepend": [f"~/{word}"]},
            {"env": {"CUDA_VISIBLE_DEVICES": word}},
            {"env": {"CFLAGS": word}},
            {"env": {"CC": word}},
            {"lock": f"~/{word}"},
        )
    )
    return {"ssh": "box", "python": sys.executable, **field}


CANARY = Fault(
    "canary",
    "hostile strings in every field that reaches a host: `$(...)`, `;`, backticks, newlines, quotes, leading dashes",
    5000,
    "0 canaries",
    cage,
    trial,
)
