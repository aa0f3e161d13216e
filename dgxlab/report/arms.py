"""Experiments side by side: what each of them measured, and the origin of their numbers beneath a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.errors import UsageError
from dgxlab.judgement import Judged
from dgxlab.model import PROTOCOL, SESSIONS, ChainStep, FileModel, ModelStep, model_id
from dgxlab.report import ask as asking
from dgxlab.report.ask import ArmAsk, Ask, CellAsk, Query
from dgxlab.report.evidence import Evidence, Measured, find
from dgxlab.report.records import ArmsTable, Column, Origin, Value
from dgxlab.report.session import ChainSession, older
from dgxlab.report.tables import (
    CONCURRENCY,
    SINGLE_STREAM,
    Form,
    conditions,
    env_text,
    flags,
    leading,
    others_of,
    provenance,
    rank,
    stream_test,
)
from dgxlab.stats import Verdict
from dgxlab.store import alias
from dgxlab.tools import BENCHES

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

SPEEDS = ("speed_pp", "speed_tg")
"""What a table of concurrency shows of each experiment."""


@dataclass(frozen=True)
class ArmCells:
    """One experiment with its evidence.

    Attributes:
        name: What tables call it.
        cells: Those that are wanted.
    """

    name: str
    ask: Ask
    arm: ArmAsk
    evidence: Evidence
    cells: tuple[Measured, ...]

    @property
    def experiment(self) -> str:
        """Its own name."""
        return self.arm.arm.name

    def origin(self) -> Origin:
        """Return where its cells come from."""
        source = provenance(self.experiment, self.arm, self.evidence, self.cells)
        envs = dict.fromkeys(env_text(cell.ask.env) for cell in self.cells)
        notes = [f"ran with {env}" for env in envs if env]
        if self.ask.protocol != PROTOCOL:
            notes.append(f"measured by protocol {self.ask.protocol}, not {PROTOCOL}")
        return Origin(self.name, source, conditions(self.cells), tuple(notes))


def find_arms(store: Store, wanted: Query) -> list[ArmCells]:
    """Return everything that was measured for each experiment or session that is named.

    Raises:
        UsageError: if one was never measured, or a session is of two arms.
    """
    asks = [asking.of_arm(store, name, wanted.host) for name in wanted.experiment]
    for session in wanted.session:
        job = store.job(session)
        if job.kind in SESSIONS:
            raise UsageError(f"session {session} compares; its numbers are in form=verdicts", next="dgxlab jobs")
        asks.append(asking.of_session(store, job))
    names = [arm.arm.name for ask in asks for arm in ask.arms]
    arms = []
    for ask in asks:
        for arm in ask.arms:
            name = arm.arm.name if names.count(arm.arm.name) == 1 else f"{arm.arm.name} in {alias(str(ask.session))}"
            evidence = find(store, ask, arm)
            arms.append(ArmCells(name, ask, arm, evidence, evidence.measured))
    return arms


def of_tools(arms: Sequence[ArmCells], tools: Sequence[str], wanted: Query) -> list[ArmCells]:
    """Keep the cells of these tools that are wanted.

    Raises:
        UsageError: if an experiment has none, or a pattern or the model fits none of them.
    """
    every = [cell for arm in arms for cell in arm.cells if cell.ask.cell.tool in tools]
    every = [cell for cell in every if wanted.model in ("", cell.ask.model)]
    for pattern in wanted.cells:
        if not any(fits(pattern, cell.ask) for cell in every):
            raise UsageError(f"no cell of form={wanted.form} has all of {pattern!r}", next="dgxlab report")
    if wanted.cells:
        every = [cell for cell in every if any(fits(pattern, cell.ask) for pattern in wanted.cells)]
    ids = {id(cell) for cell in every}
    kept = [replace(arm, cells=tuple(cell for cell in arm.cells if id(cell) in ids)) for arm in arms]
    for arm in kept:
        if not arm.cells:
            of = f" of model {wanted.model}" if wanted.model else ""
            raise UsageError(f"{arm.name} has nothing measured{of} for form={wanted.form}", next="dgxlab report")
    return kept


def by_environment(arms: Sequence[ArmCells]) -> list[ArmCells]:
    """Split an experiment where a cell was measured in several environments, which the names then say."""
    return [part for arm in arms for part in _environments(arm)]


def _environments(arm: ArmCells) -> Iterator[ArmCells]:
    cells = [(cell.ask.key, cell.ask.model) for cell in arm.cells]
    if len(set(cells)) == len(cells):
        yield arm
        return
    shared = common([cell.ask.env for cell in arm.cells])
    for digest in dict.fromkeys(cell.ask.env_digest for cell in arm.cells):
        mine = tuple(cell for cell in arm.cells if cell.ask.env_digest == digest)
        own = {name: value for name, value in mine[0].ask.env.items() if name not in shared}
        env = env_text(own)
        yield replace(arm, name=" ".join(filter(None, (arm.name, env))), cells=mine)


def fits(pattern: str, ask: CellAsk) -> bool:
    """Tell whether a cell has all words of a pattern: of its name, values of its parameters, or `key=value`."""
    cell = ask.cell
    every = {**cell.params, **cell.fixed}
    known = {*asking.label(cell).split(), *map(str, every.values()), *(f"{k}={v}" for k, v in every.items())}
    if cell.tool == "llama-bench":
        known.update(stream_test(cell.params).split())
    return known.issuperset(pattern.split())


def common(settings: Sequence[Mapping[str, Value]]) -> dict[str, Value]:
    """Return what has the same value in all of them."""
    first, *others = settings or [{}]
    return {k: v for k, v in first.items() if all(k in other and other[k] == v for other in others)}


def in_order(cells: Iterable[Measured], key: Callable[[CellAsk], object]) -> list[CellAsk]:
    """Return the cells of all arms, each once."""
    return list({key(cell.ask): cell.ask for cell in cells}.values())


# -- tables -----------------------------------------------------------------------------------------------------------


def side_by_side(
    form: str,
    title: str,
    arms: Sequence[ArmCells],
    columns: Iterable[Column],
    rows: Iterable[Mapping[str, Value]],
    *,
    settings: Mapping[str, Value],
    notes: Iterable[str] = (),
) -> ArmsTable:
    """Return a table about experiments, with the provenance of each and the flags of its runs."""
    origins = tuple(arm.origin() for arm in arms)
    every = [
        replace(flag, labels=tuple(f"{arm.name} {label}" for label in flag.labels) or (arm.name,))
        for arm in arms
        for flag in flags(arm.cells, arm.experiment, arm.evidence.host_name)
    ]
    return ArmsTable(
        form,
        title,
        tuple(columns),
        tuple(rows),
        origins[0].provenance,
        settings,
        flags=tuple(sorted(every, key=lambda flag: not flag.hard)),
        origins=origins,
        notes=(*notes, *_caveats(arms)),
    )


def _caveats(arms: Sequence[ArmCells]) -> Iterator[str]:
    """Yield that numbers come from several devices, and which come from an older protocol."""
    if len({arm.evidence.device for arm in arms if arm.evidence.device}) > 1:
        yield "the rows are of different devices (see Sources): their ratios are not of builds alone"
    if older := dict.fromkeys(arm.experiment for arm in arms if arm.ask.protocol != PROTOCOL):
        yield f"measured by an older protocol: {', '.join(older)}; dgxlab run measures again"


def single_stream(arms: Sequence[ArmCells]) -> ArmsTable:
    """Return a row for each experiment and a column for each test."""
    layout = _Layout(SINGLE_STREAM, by_environment(arms))
    groups: dict[tuple[str, str], list[Measured]] = {}
    for arm in layout.arms:
        for cell in arm.cells:
            row = repr((cell.ask.model, sorted(layout.others(cell.ask).items())))
            groups.setdefault((arm.name, row), []).append(cell)
    rows: list[dict[str, Value]] = []
    for (name, _), cells in groups.items():
        values = {stream_test(cell.ask.cell.params): cell.quantities.get("avg_ts") for cell in cells}
        others = layout.others(cells[0].ask)
        lead = {"arm": name, "model": cells[0].ask.model, **{key: others.get(key) for key in layout.varying}}
        rows.append({**lead, **values})
    asks = in_order(layout.cells, lambda ask: stream_test(ask.cell.params))
    asks.sort(key=lambda ask: (not ask.cell.params.get("n_prompt"), rank(SINGLE_STREAM, ask)))
    tests = [stream_test(ask.cell.params) for ask in asks]
    columns = [Column("arm", "experiment"), *leading(rows, ["model"] * layout.models + layout.varying)]
    columns += [Column(test, test, "avg_ts") for test in tests]
    return side_by_side("single-stream", "Single stream", layout.arms, columns, rows, settings=layout.settings)


def concurrency(arms: Sequence[ArmCells]) -> ArmsTable:
    """Return a row for each number of sequences, and the speeds of each experiment beside each other."""
    layout = _Layout(CONCURRENCY, by_environment(arms))

    def place(ask: CellAsk) -> str:
        return repr((ask.model, sorted(CONCURRENCY.lead(ask).items()), sorted(layout.others(ask).items())))

    rows: dict[str, dict[str, Value]] = {}
    for ask in sorted(in_order(layout.cells, place), key=lambda ask: rank(CONCURRENCY, ask)):
        others = layout.others(ask)
        lead: dict[str, Value] = {"model": ask.model} if layout.models else {}
        rows[place(ask)] = {**lead, **CONCURRENCY.lead(ask), **{key: others.get(key) for key in layout.varying}}
    columns = leading(list(rows.values()), list(next(iter(rows.values()))))
    for number, arm in enumerate(layout.arms):
        for metric in SPEEDS:
            key = f"{metric}.{number}"
            for cell in arm.cells:
                rows[place(cell.ask)][key] = cell.quantities.get(metric)
            label = units.metric(metric).label
            columns.append(Column(key, f"{arm.name} {label}" if len(layout.arms) > 1 else label, metric))
    return side_by_side("concurrency", "Concurrency", layout.arms, columns, rows.values(), settings=layout.settings)


class _Layout:
    """What shapes the numbers of experiments side by side, beyond the columns of their form.

    Attributes:
        models: They are of several models.
        varying: Keys of what differs, each a column.
        settings: What shapes every number alike.
    """

    def __init__(self, form: Form, arms: Sequence[ArmCells]) -> None:
        self._form = form
        self.arms = arms
        self.cells = [cell for arm in arms for cell in arm.cells]
        self.models = len({cell.ask.model for cell in self.cells}) > 1
        every = [self.others(cell.ask) for cell in self.cells]
        shared = common(every)
        self.varying = [key for key in dict.fromkeys(key for one in every for key in one) if key not in shared]
        model: dict[str, Value] = {} if self.models else {"model": self.cells[0].ask.model}
        self.settings = {**model, **shared}

    def others(self, ask: CellAsk) -> dict[str, Value]:
        """Return what shapes a number, the environment left out: it belongs to the experiment and not to the row."""
        return {key: value for key, value in others_of(self._form, ask).items() if key not in ("env", "model")}


# -- the sessions of one pair -----------------------------------------------------------------------------------------

Key = tuple[str, ...]
"""What makes two comparisons the same: cells, metric, model and environments."""


def sessions_of_pair(store: Store, job: Job) -> list[Job]:
    """Return the sessions of the same kind, baseline and candidate that have verdicts, the first one first."""
    rows = store.rows(
        """SELECT DISTINCT job_id, intent_at FROM verdict_list
           WHERE (kind, baseline_arm, candidate_arm) IN (
               SELECT kind, baseline_arm, candidate_arm FROM verdict_list WHERE job_id = ?)
           ORDER BY intent_at, job_id""",
        (job.job_id,),
    )
    return [store.job(row["job_id"]) for row in rows]


def pair_table(store: Store, job: Job, sessions: Sequence[Job]) -> ArmsTable:
    """Return a row for each comparison of a session, with its effect in each session of the pair: none hides another.

    Raises:
        UsageError: if a session's plan cannot be read.
    """
    compared = [dict(_comparisons(store, each)) for each in sessions]
    own = sessions.index(job)
    names = {key: _compared(chain, judged) for key, (chain, judged) in compared[own].items()}
    twice = {name for name, count in Counter(names.values()).items() if count > 1}
    rows: list[dict[str, Value]] = []
    for key, (chain, _) in compared[own].items():
        env = env_text(chain.baseline.env) if names[key] in twice else ""
        rows.append({"cell": " ".join(filter(None, (names[key], env)))})
        for number, of_session in enumerate(compared, 1):
            if key in of_session:
                rows[-1] |= _effect(number, of_session[key][1].verdict)
    labels = [f"session {number}{older(each.protocol)}" for number, each in enumerate(sessions, 1)]
    columns = [Column(f"effect.{n}", text + ", this one" * (n - 1 == own)) for n, text in enumerate(labels, 1)]
    candidate = next(iter(compared[own].values()))[1].candidate_arm
    origins = []
    for text, each in zip(labels, sessions, strict=True):
        session = ChainSession(store, each, asking.plan_of(each))
        origins.append(Origin(text, session.origin(session.plan.arm(candidate))))
    return ArmsTable(
        "verdicts",
        f"Effects in the {len(sessions)} sessions of this pair",
        (Column("cell", "cell"), *columns),
        tuple(rows),
        origins[own].provenance,
        origins=tuple(origins),
        notes=("effect with the interval that decides, in % of the baseline; the lines above are of the candidate",),
    )


def _comparisons(store: Store, job: Job) -> Iterator[tuple[Key, tuple[ChainStep, Judged]]]:
    plan = asking.plan_of(job)
    chains = {chain.id: chain for chain in plan.chains}
    steps = [step for step in plan.steps if isinstance(step, ModelStep)]
    models = {step.model: model_id(step.recipe or FileModel(step.path)) for step in steps}
    for judged in judgement.recorded(store, job.job_id):
        chain, comparison = chains[judged.chain], judged.comparison
        around = (models.get(chain.baseline.model, ""), env_text(chain.baseline.env), env_text(chain.candidate.env))
        yield (comparison.baseline, comparison.candidate, comparison.metric, *around), (chain, judged)


def _compared(chain: ChainStep, judged: Judged) -> str:
    cell = next(cell for cell in chain.baseline.cells if cell.key == judged.comparison.baseline)
    metric = units.metric(judged.comparison.metric).label if len(BENCHES[cell.tool].compared) > 1 else ""
    return " ".join(filter(None, (chain.baseline.model, asking.label(cell), metric)))


def _effect(number: int, verdict: Verdict) -> Mapping[str, Value]:
    """Return what one session found, in words and as numbers."""
    words = ["" if verdict.effect is None else percent(verdict.effect, "+")]
    words += [f"({range_text(verdict.interval)})"] if verdict.interval else []
    return {
        f"effect.{number}": " ".join(filter(None, (*words, verdict.verdict))),
        **{f"{name}.{number}": value for name, value in in_percent(verdict).items()},
    }


def percent(share: float, sign: str = "") -> str:
    """Write a share as a number of percent: `0.59`; `+59.19` with a sign, of which 0 has none."""
    shown = f"{100 * share:{sign}.2f}"
    return "0.00" if shown in ("+0.00", "-0.00") else shown


def range_text(interval: tuple[float, float]) -> str:
    """Write an interval as numbers of percent."""
    return " to ".join(percent(bound, "+") for bound in interval)


def in_percent(verdict: Verdict) -> dict[str, Value]:
    """Return effect and intervals as numbers of percent."""
    low, high = verdict.ci or (None, None)
    same_low, same_high = verdict.same_ci or (None, None)
    shares = {"effect": verdict.effect, "ci_low": low, "ci_high": high, "same_low": same_low, "same_high": same_high}
    return {f"{name}_pct": None if share is None else 100 * share for name, share in shares.items()}
