"""What was tried: the steps of a kernel, the experiments with a hypothesis, and where each comes from."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from dgxlab import judgement, units
from dgxlab.errors import UsageError
from dgxlab.report import ask as asking
from dgxlab.report.arms import ArmCells, by_environment, common, find_arms, in_order, of_tools, side_by_side
from dgxlab.report.ask import CellAsk, Query, op_params
from dgxlab.report.beside import Cell, is_of_op, rows_beside
from dgxlab.report.evidence import find, machine
from dgxlab.report.records import ArmsTable, Column, Number, Origin, Provenance, Value, columns
from dgxlab.report.session import WORDS, older
from dgxlab.report.tables import OPS, SINGLE_STREAM, origin, others_of, rank, stream_test
from dgxlab.report.verdicts import PREFIX
from dgxlab.stats import VERDICTS
from dgxlab.store import REJECTED, alias

if TYPE_CHECKING:
    from dgxlab.judgement import Judged
    from dgxlab.store import Job, Store

# -- what the newest session of two arms says of its candidate --------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What the newest session of two arms says of its candidate.

    Attributes:
        session: Its job.
        kind: ab or screen.
        word: For the whole session.
        protocol: By which it is judged.
        promoted: At least one claim is, and none is slower or invalid.
        why: In words.
        gains: How many times as fast the candidate is, by its cell's key and the metric of the comparison.
    """

    session: str
    kind: str
    word: str
    protocol: int
    promoted: bool
    why: str
    gains: Mapping[tuple[str, str], float]

    @property
    def shown(self) -> str:
        """The word, marked where it is a screen's, or older than its neighbours in a table may be."""
        return PREFIX[self.kind] + self.word + older(self.protocol)


def newest(store: Store, candidate: str, baseline: str = "") -> Outcome | None:
    """Return what the newest session says of a candidate, against that baseline or any; None without one."""
    rows = store.rows(
        """SELECT DISTINCT job_id, kind, protocol FROM verdict_list
           WHERE candidate_arm = :candidate AND baseline_arm <> candidate_arm
             AND (:baseline = '' OR baseline_arm = :baseline)
           ORDER BY intent_at DESC, job_id DESC LIMIT 1""",
        {"candidate": candidate, "baseline": baseline},
    )
    if not rows:
        return None
    judged = judgement.recorded(store, rows[0]["job_id"])
    word = judgement.whole([each.verdict.verdict for each in judged])
    promoted = word == "faster" and any(each.promoted for each in judged)
    gains = {
        (each.comparison.candidate, each.comparison.metric): 1 + _gain(each) / 100
        for each in judged
        if each.verdict.effect is not None
    }
    why = "; ".join(_because(judged))
    return Outcome(rows[0]["job_id"], rows[0]["kind"], word, rows[0]["protocol"], promoted, why, gains)


def _because(judged: Sequence[Judged]) -> Iterator[str]:
    """Yield how many claims came out how, by how much, and why the first of them did."""
    for word in VERDICTS:
        of_word = [each for each in judged if each.verdict.verdict == word]
        if not of_word:
            continue
        gains = sorted(_gain(each) for each in of_word if each.verdict.effect is not None)
        ends = dict.fromkeys(f"{gain:+.2f}" for gain in gains[:1] + gains[-1:])
        around = f" ({' to '.join(ends)} % in speed)" if ends else ""
        first = next((reason for each in of_word for reason in judgement.reasons(each.verdict)), "")
        held = next((reason for each in of_word if (reason := judgement.held_back(each.verdict))), "")
        why = ", ".join(dict.fromkeys(filter(None, (first if word == "invalid" else "", held))))
        yield f"{len(of_word)} of {len(judged)} {word}{around}" + (f": {why}" if why else "")


def _gain(judged: Judged) -> float:
    """Return by how many percent a comparison's candidate is faster, also where it is about a time."""
    effect = judged.verdict.effect or 0.0
    return 100 * (effect if judged.verdict.better == "higher" else 1 / (1 + effect) - 1)


# -- experiments with a hypothesis ------------------------------------------------------------------------------------

STATUS = {
    "faster": "faster, not promoted",
    "mixed": "faster and slower",
    "slower": "dead end",
    "same": "dead end",
    "inconclusive": "undecided",
    "invalid": "undecided",
}
"""The status of an experiment by the word of its A/B session, unless it is promoted."""


def experiments(store: Store, wanted: Query) -> ArmsTable:
    """Return a row for each experiment with a hypothesis, the first that was tried first.

    Raises:
        UsageError: if there is none, or none of a name that is asked for.
    """
    tried = store.rows(
        """SELECT e.digest, e.name, e.hypothesis, min(j.intent_at) AS first, max(j.intent_at) AS last
           FROM experiments AS e LEFT JOIN jobs AS j ON j.experiment = e.digest
           WHERE e.hypothesis <> '' GROUP BY e.digest ORDER BY first IS NULL, first, e.name, e.digest"""
    )
    hypotheses = {row["name"]: row["hypothesis"] for row in sorted(tried, key=lambda row: row["last"] or 0.0)}
    for name in wanted.experiment:
        if name not in hypotheses:
            raise UsageError(f"{store.path} has no experiment {name!r} with a hypothesis", next="dgxlab report")
    names = wanted.experiment or tuple(dict.fromkeys(row["name"] for row in tried))
    if not names:
        raise UsageError(f"{store.path} has no experiment with a hypothesis", next="dgxlab report")
    rows: list[dict[str, Value]] = []
    origins = []
    for name in names:
        row = _status(newest(store, name), _latest(store, name))
        rows.append({"lever": name, "hypothesis": hypotheses[name], **row})
        if "session" in row:
            origins.append(Origin(name, origin_of_job(store, store.job(str(row["session"])), name)))
    nowhere = Provenance(names[0], (), "", (), "", None, "")
    first = origins[0].provenance if origins else nowhere
    shown = columns("lever hypothesis status verdict why session", verdict="newest verdict")
    return ArmsTable("levers", "Levers", shown, tuple(rows), first, origins=tuple(origins))


def _latest(store: Store, name: str) -> Mapping[str, Any] | None:
    """Return the newest session that was about an experiment: alone, or as the candidate."""
    rows = store.rows(
        f"""SELECT job_id, state, error FROM jobs JOIN experiments ON digest = experiment
           WHERE experiments.name = ? AND kind <> 'noise'
           ORDER BY job_id IN ({REJECTED}), intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        (name,),
    )
    return rows[0] if rows else None


def _status(outcome: Outcome | None, latest: Mapping[str, Any] | None) -> dict[str, Value]:
    """Return the status of an experiment, its newest verdict and the session that decides: the newest if it failed."""
    state = latest["state"] if latest else ""
    if outcome is not None and state not in ("failed", "lost"):
        row = {"verdict": outcome.shown, "why": outcome.why, "session": outcome.session}
        if state in ("intended", "running"):
            return {**row, "status": "being measured"}
        if outcome.promoted:
            return {**row, "status": "promoted"}
        if outcome.kind == "screen":  # a screen can reject, never accept
            return {**row, "status": "dead end" if outcome.word in ("slower", "same") else "screened"}
        return {**row, "status": STATUS[outcome.word]}
    if latest is None:
        return {"status": "not measured"}
    status, why = state, latest["error"]
    if state in ("intended", "running"):
        status, why = "being measured", ""
    if state == "done":
        status, why = "measured", "no A/B session judged it"
    verdict = outcome.shown if outcome else None
    return {"verdict": verdict, "why": why, "session": latest["job_id"], "status": status}


# -- steps of a kernel ------------------------------------------------------------------------------------------------

OP_METRICS = ("flops", "bandwidth_gb_s", "time_us")
"""What a column of an operation shows: the first of these that its rows have."""


class _Ratio(NamedTuple):
    """How many times as fast as the baseline a step is, in words, and by which numbers.

    Attributes:
        by: "verdict", "medians" of sessions apart, or "device" where there is none between devices.
    """

    text: str | None
    by: str = ""


@dataclass(frozen=True)
class _Shown:
    """One column: a cell that every step may have, in any environment; `ask` is one step's."""

    label: str
    metric: str
    ask: CellAsk

    @property
    def name(self) -> str:
        """The column's key."""
        return " ".join(filter(None, _key(self.ask)))


def steps(store: Store, wanted: Query) -> ArmsTable:
    """Return a row for each experiment, in the order given, the baseline first where it is not among them.

    Raises:
        UsageError: if one was never measured, or nothing fits.
    """
    names = wanted.experiment
    if wanted.baseline and wanted.baseline not in names:
        names = (wanted.baseline, *names)
    every = find_arms(store, Query("steps", names, host=wanted.host))
    arms = by_environment(of_tools(every, ("backend-ops", "llama-bench"), wanted))
    outcomes: dict[str, Outcome] = {}
    for arm in arms:
        # a verdict is of an experiment, not of one of its environments
        alone = sum(other.arm is arm.arm for other in arms) == 1
        if alone and (outcome := newest(store, arm.experiment, wanted.baseline)):
            outcomes[arm.name] = outcome
    arms = [_as_judged(store, arm, outcomes[arm.name]) if arm.name in outcomes else arm for arm in arms]
    shown, settings = _columns(arms)
    base = next((arm for arm in arms if arm.experiment == wanted.baseline), None)
    ratios = [_ratio(arm, base, shown, outcomes.get(arm.name)) for arm in arms]
    rows = [_row(arm, ratio, shown, outcomes.get(arm.name)) for arm, ratio in zip(arms, ratios, strict=True)]
    heads = [Column("step", "step"), *(Column(cell.name, cell.label, cell.metric) for cell in shown)]
    if base is not None:
        heads.append(Column("ratio", f"vs {base.name}", numeric=True))
    if outcomes:
        heads.append(Column("verdict", "A/B verdict"))
    heads.append(Column("notes", "notes"))
    notes = _caveats(base, rows, {ratio.by for ratio in ratios}) if base else ()
    table = side_by_side("steps", "Steps", arms, heads, rows, settings=settings, notes=notes)
    return rows_beside(wanted, table, lambda cell: _column_of(cell, shown))


def _column_of(published: Cell, shown: Sequence[_Shown]) -> str | None:
    """Return the only column that a published cell belongs into."""

    def has(cell: CellAsk) -> bool:
        if cell.cell.tool == "llama-bench":
            return published == (stream_test(cell.cell.params),)
        return is_of_op(published, cell.cell.params.get("op_name"), cell.cell.params)

    fitting = [cell.name for cell in shown if cell.metric in ("flops", "avg_ts") and has(cell.ask)]
    return fitting[0] if len(fitting) == 1 else None


def _as_judged(store: Store, arm: ArmCells, outcome: Outcome) -> ArmCells:
    """Put the numbers of the session that judged an experiment in place of those of others: its verdict is on them."""
    measured = find(store, replace(arm.ask, session=outcome.session), arm.arm).measured
    judged = {cell.ask.place: cell for cell in measured}
    return replace(arm, cells=tuple(judged.get(cell.ask.place, cell) for cell in arm.cells))


def _row(arm: ArmCells, ratio: _Ratio, shown: Sequence[_Shown], outcome: Outcome | None) -> dict[str, Value]:
    sessions = {cell.run["job_id"] for cell in arm.cells}
    return {
        "step": arm.name,
        **_quantities(arm, shown),
        "ratio": ratio.text,
        "verdict": None if outcome is None else outcome.shown,
        "verdict_session": None if outcome is None else outcome.session,
        "verdict_elsewhere": None if outcome is None else outcome.session not in sessions,
        "notes": arm.ask.hypothesis,
    }


def _ratio(arm: ArmCells, base: ArmCells | None, shown: Sequence[_Shown], outcome: Outcome | None) -> _Ratio:
    """Compare a step with the baseline over the columns that both have."""
    if base is None:
        return _Ratio(None)
    if arm is base:
        return _Ratio("baseline")
    compared = {(cell.ask.key, "time_us" if cell.ask.cell.tool == "backend-ops" else cell.metric) for cell in shown}
    if outcome and (gains := [gain for key, gain in outcome.gains.items() if key in compared]):
        return _Ratio(f"{_ends(gains)} ({WORDS[outcome.kind]})", "verdict")
    if arm.evidence.device != base.evidence.device:
        return _Ratio("of another device", "device")
    mine, others = _quantities(arm, shown), _quantities(base, shown)
    ratios = []
    for cell in shown:
        if cell.name in mine and cell.name in others:
            share = mine[cell.name].middle / others[cell.name].middle
            ratios.append(share if units.metric(cell.metric).better == "higher" else 1 / share)
    return _Ratio(_ends(ratios), "medians") if ratios else _Ratio(None)


def _ends(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{share:.2f}x" for share in (min(ratios), max(ratios))))


def _quantities(arm: ArmCells, shown: Sequence[_Shown]) -> dict[str, Number]:
    by_key = {_key(cell.ask): cell.quantities for cell in arm.cells}
    pairs = ((cell, by_key.get(_key(cell.ask), {})) for cell in shown)
    return {cell.name: quantities[cell.metric] for cell, quantities in pairs if cell.metric in quantities}


def _key(ask: CellAsk) -> tuple[str, str]:
    return ask.key, ask.model


def _caveats(base: ArmCells, rows: Sequence[Mapping[str, Value]], ratios_by: Collection[str]) -> Iterator[str]:
    yield f"vs {base.name} is how many times as fast, over a row's columns from the lowest to the highest"
    for row in rows:
        if row["verdict"]:
            elsewhere = ", which measured another build or device than the row's numbers"
            session = f"session {alias(str(row['verdict_session']))}{elsewhere if row['verdict_elsewhere'] else ''}"
            yield f"{row['step']}'s verdict against {base.name}, and its ratio, are of {session}"
    if "medians" in ratios_by:
        yield "a ratio alone is of the medians above, of sessions apart: no verdict"
    if "device" in ratios_by:
        yield f"no ratio is taken between devices: {base.name} was measured on {base.evidence.host}"


def _columns(arms: Sequence[ArmCells]) -> tuple[list[_Shown], dict[str, Value]]:
    """Return the columns, operations before prompts, and what shapes them all alike."""
    cells = [cell for arm in arms for cell in arm.cells]
    asks = in_order(cells, _key)
    ops = sorted((ask for ask in asks if ask.cell.tool == "backend-ops"), key=lambda ask: rank(OPS, ask))
    streams = sorted((ask for ask in asks if ask.cell.tool == "llama-bench"), key=lambda ask: rank(SINGLE_STREAM, ask))
    alike = common([_op_words(ask) for ask in ops])
    if len(ops) == 1:  # nothing tells it apart, and it still needs a name
        alike = {key: value for key, value in alike.items() if key not in ("type_a", "n")}
    shown = []
    for ask in ops:
        have = {metric for cell in cells if _key(cell.ask) == _key(ask) for metric in cell.quantities}
        words = [
            str(value) if isinstance(value, str) else f"{key}={value}"
            for key, value in _op_words(ask).items()
            if key not in alike
        ]
        shown += [_Shown(" ".join(words), metric, ask) for metric in OP_METRICS if metric in have][:1]
    settings = [
        {"model": ask.model, **{key: value for key, value in others_of(SINGLE_STREAM, ask).items() if key != "env"}}
        for ask in streams
    ]
    shared = common(settings)
    for ask, words_of in zip(streams, settings, strict=True):
        more = [f"{key}={value}" for key, value in words_of.items() if key not in shared]
        shown.append(_Shown(" ".join([stream_test(ask.cell.params), *more]), "avg_ts", ask))
    return shown, {**alike, **shared}


def _op_words(ask: CellAsk) -> dict[str, Value]:
    return {"op": ask.cell.params.get("op_name"), "backend": ask.cell.params.get("backend_name"), **op_params(ask.cell)}


def origin_of_job(store: Store, job: Job, name: str) -> Provenance:
    """Return one arm's side of a session, from its plan; a build that never was has no id."""
    built = store.rows("SELECT build_id FROM arms WHERE job_id = ? AND arm = ?", (job.job_id, name))
    device = store.devices(job.job_id).get(name)
    build = built[0]["build_id"] if built else None
    return origin(asking.plan_of(job).arm(name), [job.job_id], build, machine(job, device), device)
