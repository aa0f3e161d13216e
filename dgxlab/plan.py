"""From an experiment to the exact list of what runs: build, models, flag checks, gates, runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from dgxlab import synth, tools
from dgxlab.chains import comparisons
from dgxlab.compare import pairs
from dgxlab.errors import SpecError, edit
from dgxlab.model import (
    BASELINE,
    CANDIDATE,
    WAIT_S,
    Arm,
    BuildStep,
    ChainStep,
    Check,
    CheckCommand,
    CheckStep,
    DerivedModel,
    EngagedGate,
    Experiment,
    FileModel,
    GateStep,
    Model,
    ModelStep,
    ParityGate,
    Plan,
    ProbeStep,
    RunStep,
    Source,
    Step,
    SyntheticModel,
    canonical,
    model_id,
)
from dgxlab.stats import fewest_cycles
from dgxlab.tools import Launch, Wanted, launches, parity

NAME_LENGTH = 80
"""Characters of a session's name in its id, which becomes a file name."""


def new_job_id(name: str) -> str:
    """Return an id that sorts by time and names the experiment: 20261120-120301-quickstart-3f2a9c."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{name[:NAME_LENGTH]}-{secrets.token_hex(3)}"


def make(
    experiment: Experiment,
    source: Source,
    *,
    job_id: str,
    wanted: Wanted = lambda model, env, cell: True,
    gates: Sequence[ParityGate | Check] | None = None,
    bench: bool = True,
    wait_s: float = WAIT_S,
) -> Plan:
    """Return the plan of one arm: build, models, flag checks, gates, runs, in this order.

    Args:
        wanted: Says which cells still need a number; a launch without such a cell is left out.
        gates: The gates to run; None for all of the experiment's.
        bench: False for the gates alone.
        wait_s: How long the job may wait for its devices, 0 for not at all.

    Raises:
        SpecError: if an entry's matrix has nothing left, or its sizes do not fit its own n_ctx.
    """
    arm = make_arm(experiment, source)
    left = enumerate(launches(experiment, wanted) if bench else ())
    runs = [_run(f"run:{number}", experiment, arm, launch) for number, launch in left]
    asked = [_gate(experiment, arm, gate, n) for n, gate in enumerate(own(experiment) if gates is None else gates)]
    steps: list[Step] = [_build(arm), *_prepared(experiment, arm, runs, asked), *asked, *runs]
    work = (experiment.name, experiment.digest, (arm,), tuple(steps), "run" if bench else "gate")
    return Plan(job_id, *work, wait_s=wait_s, specs=(experiment.spec,))


def make_ab(
    baseline: Experiment,
    candidate: Experiment,
    sources: tuple[Source, Source],
    *,
    job_id: str,
    kind: str = "ab",
    wait_s: float = WAIT_S,
    max_s: float = 0.0,
) -> Plan:
    """Return the plan of a session: both builds, models, flag checks and gates, the chains, the gates again.

    The same experiment on the same tree is one arm, and the session an A/A session. The baseline's `session` holds.

    Args:
        kind: "ab", "noise", or "screen" for one bracket instead of a chain, without gates after it.
        max_s: Seconds that the chains may take, each the same part of them; 0 for no limit.

    Raises:
        SpecError: if two different arms have one name, or nothing in common that can be measured; if the session has
            fewer cycles than its family of claims needs, or a limit of time that has no say.
    """
    arms = [make_arm(baseline, sources[0])]
    if (candidate.digest, sources[1]) != (baseline.digest, sources[0]):
        if candidate.name == baseline.name:
            raise SpecError(
                f"two arms that differ are both called {baseline.name}: give one of them another name",
                next=edit(candidate.path),
            )
        arms.append(make_arm(candidate, sources[1]))
    sides = list(zip((baseline, candidate), arms, strict=False))
    chains = _of_family(baseline, tuple(_chains(baseline, candidate, arms, kind)), max_s)
    gates = [(side, gate) for side in sides for gate in own(side[0])]
    before = [_gate(*side, gate, number) for number, (side, gate) in enumerate(gates)]
    before = [_beside(arms[0].name, step, before) for step in before]
    steps: list[Step] = [_build(arm) for arm in arms]
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


def session_name(baseline: Experiment, candidate: Experiment) -> str:
    """Return what a session of two experiments is called."""
    return f"{baseline.name}-vs-{candidate.name}"


def make_arm(experiment: Experiment, source: Source) -> Arm:
    """Return the arm that an experiment describes: source, cmake definitions with our defaults, programs."""
    defaults = {
        "CMAKE_BUILD_TYPE": "Release",
        "CMAKE_BUILD_RPATH_USE_ORIGIN": "ON",
        "BUILD_SHARED_LIBS": "ON",
        "LLAMA_BUILD_TESTS": "ON",
        # an enclosing repository's commit must not be printed as llama.cpp's
        "LLAMA_BUILD_COMMIT": experiment.pin[:9],
    }
    targets = tools.targets_of(experiment)
    for model in experiment.models.values():
        if isinstance(model, DerivedModel) or (isinstance(model, SyntheticModel) and model.quant != "F16"):
            targets.add("llama-quantize")
    targets = targets or {parity.PROGRAM}  # a kernel's own tests need no program, and cmake would build all
    cmake = {**defaults, **experiment.cmake}
    return Arm(experiment.name, source, dict(sorted(cmake.items())), experiment.env, tuple(sorted(targets)))


def own(experiment: Experiment) -> list[ParityGate | Check]:
    """Return the gates that are runs of their own; an engaged gate is a look at what other runs print."""
    return [gate for gate in experiment.gates if not isinstance(gate, EngagedGate)]


def gate_env(experiment: Experiment, gate: ParityGate | Check) -> dict[str, str]:
    """Return the environment that a gate runs the arm in."""
    return {**experiment.env, **gate.env}


# -- steps ------------------------------------------------------------------------------------------------------------


def _build(arm: Arm) -> BuildStep:
    definitions = tuple(f"-D{name}={value}" for name, value in arm.cmake.items())
    configure = ("cmake", "-S", "{src}", "-B", "{cmake}", "-G", "Ninja", *definitions)
    build = ("cmake", "--build", "{cmake}", "--parallel", "{jobs}", "--target", *arm.targets)
    return BuildStep(f"build:{arm.name}", arm.name, configure, build)


def _prepared(
    experiment: Experiment, arm: Arm, runs: Sequence[RunStep], gates: Sequence[GateStep | CheckStep], of: str = ""
) -> Iterator[ModelStep | ProbeStep]:
    commands = [command for gate in gates if isinstance(gate, CheckStep) for command in gate.commands]
    every: list[RunStep | CheckCommand] = [*runs, *commands]
    used = {launch.model for launch in every if launch.model}
    models = experiment.models
    used |= {_source(models, model) for name in used if isinstance(model := models[name], DerivedModel)}
    yield from _models(experiment, arm, used, of)
    flags: dict[str, dict[str, None]] = {}
    for launch in every:  # each program's flags are checked once, all of its launches together
        if launch.argv[0].startswith("{bin}/"):
            words = dict.fromkeys(word for word in launch.argv[1:] if is_flag(word))
            flags.setdefault(launch.argv[0], {}).update(words)
    for program, names in flags.items():
        yield ProbeStep(f"probe:{PurePosixPath(program).name}{of}", arm.name, (program, "--help"), tuple(names))


def _models(experiment: Experiment, arm: Arm, used: set[str], of: str) -> Iterator[ModelStep]:
    """Yield a step for each model that is used, what others are made from first."""
    for name, model in sorted(experiment.models.items(), key=lambda item: isinstance(item[1], DerivedModel)):
        if name not in used:
            continue
        step = f"model:{name}{of}"
        if isinstance(model, FileModel):
            yield ModelStep(step, arm.name, name, model.path)
            continue
        path = f"{{models}}/{model_id(model)}.gguf"
        if isinstance(model, DerivedModel):
            source = _source(experiment.models, model)
            derive = ("{bin}/llama-quantize", "--allow-requantize", "{in}", "{out}", model.quant)
            yield ModelStep(step, arm.name, name, path, model, (), derive, of=source)
            continue
        make = ("{python}", "{agent}", "synth", canonical(model), "{out}", *(("{vocab}",) if model.vocab else ()))
        yield ModelStep(step, arm.name, name, path, model, make, synth.quantize_argv(model.quant, model.pure))


def _source(models: Mapping[str, Model], derived: DerivedModel) -> str:
    return next(name for name, model in models.items() if model == derived.source)


def is_flag(word: str) -> bool:
    """Tell whether an argument is a flag; a negative number is a value."""
    return word.startswith("-") and not word[1:2].isdigit()


def _gate(experiment: Experiment, arm: Arm, gate: ParityGate | Check, number: int) -> GateStep | CheckStep:
    if not isinstance(gate, ParityGate):
        return tools.check_step(f"gate:{number}", arm.name, gate, experiment)
    return GateStep(f"gate:{number}", arm.name, gate, parity.command(gate), gate_env(experiment, gate), gate.limit_s)


def _beside(baseline: str, step: GateStep | CheckStep, gates: Sequence[GateStep | CheckStep]) -> GateStep | CheckStep:
    """Return a candidate's parity gate with the baseline's beside it, the one in the same environment if any."""
    if not isinstance(step, GateStep) or step.arm == baseline:
        return step
    asked = (step.gate.op, step.gate.backend)
    of_baseline = [gate for gate in gates if isinstance(gate, GateStep) and gate.arm == baseline]
    alike = [gate for gate in of_baseline if (gate.gate.op, gate.gate.backend) == asked]
    alike.sort(key=lambda gate: gate.env != step.env)
    return replace(step, like=alike[0].id) if alike else step


def _run(step: str, experiment: Experiment, arm: Arm, launch: Launch) -> RunStep:
    attempts = tools.BENCHES[launch.tool].attempts
    engaged = [gate for gate in experiment.gates if isinstance(gate, EngagedGate) and launch.tool in gate.tools]
    markers = tuple(gate.stderr for gate in engaged)  # what must be on the tool's stderr
    fields = (launch.tool, launch.argv, launch.env, launch.cells, launch.model)
    return RunStep(step, arm.name, *fields, markers, attempts, launch.limit_s)


def _chains(baseline: Experiment, candidate: Experiment, arms: Sequence[Arm], kind: str) -> Iterator[ChainStep]:
    session = baseline.session
    for number, (launch, against) in enumerate(pairs(baseline, candidate)):
        first = _run(f"chain:{number}:{BASELINE}", baseline, arms[0], launch)
        second = first if len(arms) == 1 else _run(f"chain:{number}:{CANDIDATE}", candidate, arms[1], against)
        yield ChainStep(
            f"chain:{number}",
            first,
            second,
            cycles=1 if kind == "screen" else session.cycles,
            drift_limit=session.drift_limit,
            thermal=session.thermal,
            screen=kind == "screen",
            absent=tuple(marker for marker in second.markers if marker not in first.markers),
            pin=session.pin,
            block_s=60 * session.block_minutes,
        )


def _of_family(baseline: Experiment, chains: tuple[ChainStep, ...], max_s: float) -> tuple[ChainStep, ...]:
    """Return the chains of a session with what each must know of all of them."""
    session, count = baseline.session, sum(len(comparisons(chain)) for chain in chains)
    screens, needed = any(chain.screen for chain in chains), fewest_cycles(count)
    if max_s and (screens or session.cycles or session.thermal == "cold"):
        why = "a screen is one cycle" if screens else "session.cycles fixes the number of cycles by hand"
        if session.thermal == "cold":
            why = "how long the device cools is not known beforehand (thermal: cold)"
        raise SpecError(f"a limit of minutes has no say here: {why}", next=edit(baseline.path))
    if 0 < session.cycles < needed and not screens:
        raise SpecError(
            f"{session.cycles} cycles are too few for this session of {count} claim{'s' * (count > 1)}, which needs"
            f" {needed}: with fewer, chance alone puts all runs of one arm first too often",
            next=edit(baseline.path),
        )
    if screens:
        return chains
    effect, share = 0.0 if session.cycles else session.effect, max_s / len(chains)
    return tuple(replace(chain, claims=count, effect=effect, max_s=share) for chain in chains)
