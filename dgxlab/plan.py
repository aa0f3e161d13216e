"""Make plans from experiments; a plan's steps are builds, models, flag checks, gates and runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from dgxlab import model, quantise, tools
from dgxlab.chains import comparisons
from dgxlab.compare import pairs
from dgxlab.errors import AGAIN, SpecError, edit
from dgxlab.model import Arm, ChainStep, EngagedGate, Experiment, GateStep, LaunchedGate, ParityGate, Plan, RunStep
from dgxlab.stats import claims_at, fewest_cycles
from dgxlab.tools import Launch, Wanted, launches, parity

_NAME_LENGTH = 80  # characters of a session's name in its id, which becomes a file name


def new_job_id(name: str) -> str:
    """Return a new id that sorts by time and has this name: 20261120-120301-quickstart-3f2a9c."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name[:_NAME_LENGTH]}-{secrets.token_hex(3)}"


def make(
    experiment: Experiment,
    source: model.Source,
    *,
    job_id: str,
    wanted: Wanted = lambda model, env, cell: True,
    gates: Sequence[LaunchedGate] | None = None,
    bench: bool = True,
    wait_s: float = model.WAIT_S,
) -> Plan:
    """Return the plan of one arm: build, models, flag checks, gates, runs, in this order.

    Args:
        wanted: Selects the cells to measure.
        gates: The gates to run; None for all of the experiment.
        bench: False to run the gates alone.
        wait_s: How long the job may wait for its devices, in seconds.

    Raises:
        SpecError: if a bench entry has no cell, or its sizes exceed its own n_ctx.
    """
    arm = make_arm(experiment, source)
    left = enumerate(launches(experiment, wanted) if bench else ())
    runs = [_run(f"run:{number}", experiment, arm, launch) for number, launch in left]
    asked = [
        tools.gate_step(f"gate:{number}", arm.name, gate, experiment)
        for number, gate in enumerate(launched_gates(experiment) if gates is None else gates)
    ]
    steps: list[model.Step] = [_build(arm), *_prepared(experiment, arm, runs, asked), *asked, *runs]
    work = (experiment.name, experiment.digest, (arm,), tuple(steps), "run" if bench else "gate")
    return Plan(job_id, *work, wait_s=wait_s, specs=(experiment.spec,))


def make_ab(
    baseline: Experiment,
    candidate: Experiment,
    sources: tuple[model.Source, model.Source],
    *,
    job_id: str,
    kind: str = "ab",
    wait_s: float = model.WAIT_S,
    max_s: float = 0.0,
    cells: Collection[str] = (),
    level: float = 0.0,
) -> Plan:
    """Return the plan of a session: both builds, models, flag checks and gates, the chains, the gates again.

    If both experiments and sources are equal, the session is A/A, with one arm. The `session` settings of the baseline
    apply to both.

    Args:
        kind: One of SESSIONS. A "screen" has one cycle per chain, and no gates after the chains.
        wait_s: How long the job may wait for its devices, in seconds.
        max_s: How long all chains together may take, in seconds; 0 for no limit.
        cells: The labels of the cells to compare; all if there are none.
        level: Of a ledger, at which a try is tested; 0 if the session is none.

    Raises:
        SpecError: if two different arms have the same name or no common cell; if session.cycles is too small for the
            number of verdicts and there is no level, or `max_s` would have no effect.
    """
    arms = _arms(baseline, candidate, sources)
    sides = list(zip((baseline, candidate), arms, strict=False))
    chains = _of_family(baseline, tuple(_chains(baseline, candidate, arms, kind, cells)), max_s, level)
    gates = [(experiment, arm.name, gate) for experiment, arm in sides for gate in launched_gates(experiment)]
    before = [tools.gate_step(f"gate:{n}", arm, gate, experiment) for n, (experiment, arm, gate) in enumerate(gates)]
    before = [_beside(arms[0].name, step, before) for step in before]
    steps: list[model.Step] = [_build(arm) for arm in arms]
    for experiment, arm in sides:
        runs = [run for chain in chains for run in (chain.baseline, chain.candidate) if run.arm == arm.name]
        of = f":{arm.name}" if len(sides) > 1 else ""
        steps += _prepared(experiment, arm, runs, [gate for gate in before if gate.arm == arm.name], of)
    after = [replace(gate, id=f"{gate.id}:after") for gate in before if kind != "screen"]
    return Plan(
        job_id,
        session_name(baseline, candidate),
        candidate.digest,
        tuple(arms),
        (*steps, *before, *chains, *after),
        kind,
        wait_s=wait_s,
        baseline=baseline.digest,
        specs=tuple({side.digest: side.spec for side in (baseline, candidate)}.values()),
    )


def _arms(baseline: Experiment, candidate: Experiment, sources: tuple[model.Source, model.Source]) -> list[Arm]:
    arms = [make_arm(baseline, sources[0])]
    if (candidate.digest, sources[1]) != (baseline.digest, sources[0]):
        if candidate.name == baseline.name:
            message = f"two arms that differ are both called {baseline.name}: give one of them another name"
            raise SpecError(message, next=edit(candidate.path))
        arms.append(make_arm(candidate, sources[1]))
    return arms


def session_name(baseline: Experiment, candidate: Experiment) -> str:
    """Return the name of the session that compares two experiments."""
    return f"{baseline.name}-vs-{candidate.name}"


def make_arm(experiment: Experiment, source: model.Source) -> Arm:
    """Return the arm of an experiment: `source`, to be built with its cmake definitions and dgxlab's defaults."""
    defaults = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
        "BUILD_SHARED_LIBS": "ON",
        "LLAMA_BUILD_TESTS": "ON",
        # otherwise llama.cpp would print the commit of an enclosing repository
        "LLAMA_BUILD_COMMIT": experiment.pin[:9],
    }
    targets = tools.targets_of(experiment)
    if any(_quantize(recipe) for recipe in experiment.models.values()):
        targets.add("llama-quantize")
    targets = targets or {parity.PROGRAM}  # a kernel's own tests need no program, but without targets cmake builds all
    cmake = {**defaults, **experiment.cmake}
    return Arm(experiment.name, source, dict(sorted(cmake.items())), experiment.env, tuple(sorted(targets)))


def launched_gates(experiment: Experiment) -> list[LaunchedGate]:
    """Return an experiment's gates that run commands, without the `EngagedGate`s."""
    return [gate for gate in experiment.gates if not isinstance(gate, EngagedGate)]


def _build(arm: Arm) -> model.BuildStep:
    definitions = tuple(f"-D{name}={value}" for name, value in arm.cmake.items())
    configure = ("cmake", "-S", "{src}", "-B", "{cmake}", "-G", "Ninja", *definitions)
    build = ("cmake", "--build", "{cmake}", "--parallel", "{jobs}", "--target", *arm.targets)
    return model.BuildStep(f"build:{arm.name}", arm.name, configure, build)


def _prepared(
    experiment: Experiment, arm: Arm, runs: Sequence[RunStep], gates: Sequence[GateStep], of: str = ""
) -> Iterator[model.ModelStep | model.ProbeStep]:
    commands = [command for gate in gates for command in gate.commands if not isinstance(gate.gate, ParityGate)]
    every: list[RunStep | model.CheckCommand] = [*runs, *commands]
    yield from _models(experiment, arm, {launch.model for launch in every}, of)
    flags: dict[str, dict[str, None]] = {}
    for launch in every:  # each program's flags are checked once, all of its launches together
        if (program := model.program_of(launch.argv)).startswith("{bin}/"):
            words = dict.fromkeys(word for word in launch.argv if is_flag(word))
            flags.setdefault(program, {}).update(words)
    for program, names in flags.items():
        yield model.ProbeStep(f"probe:{PurePosixPath(program).name}{of}", arm.name, (program, "--help"), tuple(names))


def _models(experiment: Experiment, arm: Arm, used: set[str], of: str) -> Iterator[model.ModelStep]:
    """Yield a step for each used model; source models come before models made from them."""
    recipes = experiment.models
    sources: dict[str, str] = {}
    for name in filter(used.__contains__, recipes):
        chain = [name]
        while isinstance(last := recipes[chain[0]], model.DerivedModel):
            chain.insert(0, next(other for other, recipe in recipes.items() if recipe == last.source))
        sources.update(zip(chain, ["", *chain], strict=False))
    for name, source in sources.items():
        recipe, step = recipes[name], f"model:{name}{of}"
        if isinstance(recipe, model.FileModel):
            yield model.ModelStep(step, arm.name, name, recipe.path)
            continue
        # only the host knows the content of its files
        path = f"{{models}}/{'{id}' if model.files_of(recipe) else model.model_id(recipe)}.gguf"
        make: tuple[str, ...] = ()
        if isinstance(recipe, model.SyntheticModel):
            vocab = ("{vocab}",) if recipe.vocab else ()
            make = ("{python}", "{agent}", "synth", model.canonical(recipe), "{out}", *vocab)
        yield model.ModelStep(step, arm.name, name, path, recipe, make, _quantize(recipe), of=source)


def _quantize(recipe: model.Model) -> tuple[str, ...]:
    """Return the command that quantises a model, () for a file and for a synthetic model as it is written."""
    if isinstance(recipe, model.FileModel) or (isinstance(recipe, model.SyntheticModel) and recipe.quant == "F16"):
        return ()
    return quantise.argv(model.quantisation(recipe))


def is_flag(word: str) -> bool:
    """Return whether an argument is a flag: it begins with `-` and is no negative number."""
    return word.startswith("-") and not word[1:2].isdigit()


def _beside(baseline: str, step: GateStep, gates: Sequence[GateStep]) -> GateStep:
    """Return a candidate's parity gate linked to the baseline's, preferably the one in the same environment."""
    if not isinstance(step.gate, ParityGate) or step.arm == baseline:
        return step
    of_baseline = [gate for gate in gates if isinstance(gate.gate, ParityGate) and gate.arm == baseline]
    alike = [gate for gate in of_baseline if model.about(gate.gate) == model.about(step.gate)]
    alike.sort(key=lambda gate: gate.env != step.env)
    return replace(step, like=alike[0].id) if alike else step


def _run(step: str, experiment: Experiment, arm: Arm, launch: Launch) -> RunStep:
    attempts = tools.BENCHES[launch.tool].attempts
    markers = experiment.markers.get(launch.tool, ())
    fields = (launch.tool, launch.argv, launch.env, launch.cells, launch.model, markers)
    files = tools.BENCHES[launch.tool].files(experiment.root)
    return RunStep(step, arm.name, *fields, attempts, launch.limit_s, files=files)


def _chains(
    baseline: Experiment, candidate: Experiment, arms: Sequence[Arm], kind: str, cells: Collection[str]
) -> Iterator[ChainStep]:
    session = baseline.session
    for number, (launch, against) in enumerate(pairs(baseline, candidate, cells)):
        first = _run(f"chain:{number}:{model.BASELINE}", baseline, arms[0], launch)
        second = first if len(arms) == 1 else _run(f"chain:{number}:{model.CANDIDATE}", candidate, arms[1], against)
        yield ChainStep(
            f"chain:{number}",
            first,
            second,
            cycles=1 if kind == "screen" else session.cycles,
            drift_limit=session.drift_limit,
            thermal=session.thermal,
            screen=kind == "screen",
            absent=tuple(marker for marker in second.markers if marker not in first.markers),
            pin=session.pin and tools.BENCHES[launch.tool].pins,
            block_s=60 * session.block_minutes,
        )


def cycles_by_hand(session: model.Session, claims: int) -> int:
    """Return how many cycles a chain has by hand, 0 if by its noise: at least as many as its claims need."""
    return session.cycles and max(session.cycles, fewest_cycles(claims))


def _of_family(
    baseline: Experiment, chains: tuple[ChainStep, ...], max_s: float, level: float
) -> tuple[ChainStep, ...]:
    """Return the chains of a session, each with the session's number of claims, effect and share of `max_s`.

    At the `level` of a ledger they are as long as those of a session with so many claims that each has that level. A
    number of cycles fixed by hand is then the least, as it is written before the level is known.
    """
    session, count = baseline.session, sum(len(comparisons(chain)) for chain in chains)
    count = claims_at(level, count) if level else count
    screens, needed = any(chain.screen for chain in chains), fewest_cycles(count)
    why = ""
    if session.thermal == "cold":
        why = "how long the device cools is not known beforehand (thermal: cold)"
    elif screens:
        why = "a screen is one cycle"
    elif session.cycles:
        why = "session.cycles fixes the number of cycles by hand"
    if max_s and why:
        raise SpecError(f"--max-minutes has nothing to shorten: {why}", next=f"{AGAIN} without --max-minutes")
    if screens:
        return chains
    if 0 < session.cycles < needed and not level:
        raise SpecError(
            f"{session.cycles} cycles are too few for this session of {count} claim{'s' * (count > 1)}, which needs"
            f" {needed}: with fewer, chance alone puts all runs of one arm first too often",
            next=f"{AGAIN} with --set session.cycles={needed}",
        )
    effect, share = 0.0 if session.cycles else session.effect, max_s / len(chains)
    cycles = cycles_by_hand(session, count)
    return tuple(replace(chain, claims=count, cycles=cycles, effect=effect, max_s=share) for chain in chains)
