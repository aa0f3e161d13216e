"""Tables of what was tried: the steps of a kernel, and the experiments with a hypothesis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dgxlab import judgement, units
from dgxlab.errors import UsageError
from dgxlab.report import ask as asking
from dgxlab.report.arms import by_environment, common, find_arms, in_order, of_tools, side_by_side
from dgxlab.report.ask import CellAsk, Query, op_params
from dgxlab.report.beside import Cell, is_of_op, rows_beside
from dgxlab.report.evidence import Evidence, find
from dgxlab.report.records import Column, Number, Origin, Provenance, Row, Table, Value, columns
from dgxlab.report.session import WORDS, older
from dgxlab.report.tables import OPS, SINGLE_STREAM, origin_of_job, others_of, rank, stream_test
from dgxlab.report.verdicts import PREFIX
from dgxlab.stats import VERDICTS
from dgxlab.store import REJECTED, alias
from dgxlab.tools import BY_FORM

if TYPE_CHECKING:
    from dgxlab.judgement import Judged
    from dgxlab.store import Store


@dataclass(frozen=True)
class Outcome:
    """The verdict of the newest session of two arms on its candidate."""

    session: str
    kind: str  # ab or screen
    word: str  # for the whole session
    protocol: int
    promoted: bool  # at least one claim is promoted, and none is slower or invalid
    why: str
    gains: Mapping[tuple[str, str], float]  # speedup factors, by the candidate's cell and metric

    @property
    def shown(self) -> str:
        """The word, marked if from a screen or from an older protocol."""
        return PREFIX[self.kind] + self.word + older(self.protocol)


def newest(store: Store, candidate: str, baseline: str = "") -> Outcome | None:
    """Return the newest session's outcome for a candidate, against this baseline or any; None if there is none."""
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
    """Yield the number of claims per verdict, their effects, and the reason of the first one."""
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
    """Return by how many percent a candidate is faster, for times as well as throughputs."""
    effect = judged.verdict.effect or 0.0
    return 100 * (effect if judged.verdict.better == "higher" else 1 / (1 + effect) - 1)


STATUS = {
    "faster": "faster, not promoted",
    "mixed": "faster and slower",
    "slower": "dead end",
    "same": "dead end",
    "inconclusive": "undecided",
    "invalid": "undecided",
}
"""The status of an experiment by the word of its A/B session, unless it is promoted."""


def experiments(store: Store, wanted: Query) -> Table:
    """Return a row for each experiment with a hypothesis, in the order tried."""
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
    rows: list[Row] = []
    origins = []
    for name in names:
        row = _status(newest(store, name), _latest(store, name))
        rows.append({"lever": name, "hypothesis": hypotheses[name], **row})
        if "session" in row:
            job = store.job(str(row["session"]))
            origins.append(Origin(name, origin_of_job(store, job, asking.plan_of(job).arm(name))))
    nowhere = Provenance(names[0], (), "", (), "", None, "")
    first = origins[0].provenance if origins else nowhere
    shown = columns("lever hypothesis status verdict why session", verdict="newest verdict")
    return Table("levers", "Levers", shown, tuple(rows), first, kind="arms", origins=tuple(origins))


def _latest(store: Store, name: str) -> Mapping[str, Any] | None:
    """Return the newest session of an experiment, alone or as the candidate."""
    rows = store.rows(
        f"""SELECT job_id, state, error FROM jobs JOIN experiments ON digest = experiment
           WHERE experiments.name = ? AND kind <> 'noise'
           ORDER BY job_id IN ({REJECTED}), intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        (name,),
    )
    return rows[0] if rows else None


def _status(outcome: Outcome | None, latest: Mapping[str, Any] | None) -> Row:
    """Return an experiment's status, its newest verdict and the deciding session: the newest session if that failed."""
    state = latest["state"] if latest else ""
    if outcome is not None and state not in ("failed", "lost"):
        status = STATUS[outcome.word]
        if state in ("intended", "running"):
            status = "being measured"
        elif outcome.promoted:
            status = "promoted"
        elif outcome.kind == "screen":  # a screen can reject, never accept
            status = "dead end" if outcome.word in ("slower", "same") else "screened"
        return {"verdict": outcome.shown, "why": outcome.why, "session": outcome.session, "status": status}
    if latest is None:
        return {"status": "not measured"}
    status, why = state, latest["error"]
    if state in ("intended", "running"):
        status, why = "being measured", ""
    if state == "done":
        status, why = "measured", "no A/B session judged it"
    verdict = outcome.shown if outcome else None
    return {"verdict": verdict, "why": why, "session": latest["job_id"], "status": status}


OP_METRICS = ("flops", "bandwidth_gb_s", "time_us")
"""Metrics of an operation; a column shows the first one that its rows have."""

ELSEWHERE = ", which measured another build or device than the row's numbers"


@dataclass(frozen=True)
class _Shown:
    """One column: a cell of the steps in any environment; `ask` is from one of the steps."""

    label: str
    metric: str
    ask: CellAsk

    @property
    def name(self) -> str:
        """The column's key."""
        return " ".join(filter(None, _key(self.ask)))


def steps(store: Store, wanted: Query) -> Table:
    """Return a row for each experiment, in the order given; a baseline not among them comes first."""
    names = wanted.experiment
    if wanted.baseline and wanted.baseline not in names:
        names = (wanted.baseline, *names)
    every = find_arms(store, Query("steps", names, host=wanted.host))
    arms = by_environment(of_tools(every, (BY_FORM["ops"], BY_FORM["single-stream"]), wanted))
    experiments = [arm.experiment for arm in arms]
    outcomes: dict[str, Outcome] = {}
    for number, arm in enumerate(arms):
        # a verdict is of an experiment, not of one of its environments
        alone = experiments.count(arm.experiment) == 1
        if alone and (outcome := newest(store, arm.experiment, wanted.baseline)):
            outcomes[arm.name] = outcome
            arms[number] = _as_judged(store, arm, outcome)
    shown, settings = _columns(arms)
    base = next((arm for arm in arms if arm.experiment == wanted.baseline), None)
    ratios = [_ratio(arm, base, shown, outcomes.get(arm.name)) for arm in arms]
    rows = [_row(arm, text, shown, outcomes.get(arm.name)) for arm, (text, _) in zip(arms, ratios, strict=True)]
    heads = [Column("step", "step"), *(Column(cell.name, cell.label, cell.metric) for cell in shown)]
    if base is not None:
        heads.append(Column("ratio", f"vs {base.name}", numeric=True))
    if outcomes:
        heads.append(Column("verdict", "A/B verdict"))
    heads.append(Column("notes", "notes"))
    notes = _caveats(base, rows, {by for _, by in ratios}) if base else ()
    table = side_by_side("steps", "Steps", arms, heads, rows, settings=settings, notes=notes)
    return rows_beside(wanted, table, lambda cell: _column_of(cell, shown))


def _column_of(published: Cell, shown: Sequence[_Shown]) -> str | None:
    """Return a published cell's column if exactly one matches."""

    def has(cell: CellAsk) -> bool:
        if cell.cell.tool == BY_FORM["single-stream"]:
            return published == (stream_test(cell.cell.params),)
        return is_of_op(published, cell.cell.params.get("op_name"), cell.cell.params)

    fitting = [cell.name for cell in shown if cell.metric in ("flops", "avg_ts") and has(cell.ask)]
    return fitting[0] if len(fitting) == 1 else None


def _as_judged(store: Store, arm: Evidence, outcome: Outcome) -> Evidence:
    """Replace an experiment's numbers by those of the session that judged it: the verdict is about them."""
    measured = find(store, replace(arm.ask, session=outcome.session)).measured
    judged = {cell.ask.place: cell for cell in measured}
    return replace(arm, measured=tuple(judged.get(cell.ask.place, cell) for cell in arm.measured))


def _row(arm: Evidence, ratio: str | None, shown: Sequence[_Shown], outcome: Outcome | None) -> Row:
    sessions = {cell.run["job_id"] for cell in arm.measured}
    return {
        "step": arm.name,
        **_quantities(arm, shown),
        "ratio": ratio,
        "verdict": None if outcome is None else outcome.shown,
        "verdict_session": None if outcome is None else outcome.session,
        "verdict_elsewhere": None if outcome is None else outcome.session not in sessions,
        "notes": arm.ask.hypothesis,
    }


def _ratio(
    arm: Evidence, base: Evidence | None, shown: Sequence[_Shown], outcome: Outcome | None
) -> tuple[str | None, str]:
    """Return a step's speedup over the baseline, as text over the common columns, and its source.

    The source is "verdict", "medians" (of different sessions), or "device": no ratio between devices.
    """
    if base is None or arm is base:
        return "baseline" if base else None, ""
    compared = {(cell.ask.key, "time_us" if cell.ask.cell.tool == BY_FORM["ops"] else cell.metric) for cell in shown}
    if outcome and (gains := [gain for key, gain in outcome.gains.items() if key in compared]):
        return f"{_ends(gains)} ({WORDS[outcome.kind]})", "verdict"
    if arm.device != base.device:
        return "of another device", "device"
    mine, others = _quantities(arm, shown), _quantities(base, shown)
    ratios = []
    for cell in shown:
        if cell.name in mine and cell.name in others:
            share = mine[cell.name].middle / others[cell.name].middle
            ratios.append(share if units.metric(cell.metric).better == "higher" else 1 / share)
    return (_ends(ratios), "medians") if ratios else (None, "")


def _ends(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{share:.2f}x" for share in (min(ratios), max(ratios))))


def _quantities(arm: Evidence, shown: Sequence[_Shown]) -> dict[str, Number]:
    by_key = {_key(cell.ask): cell.quantities for cell in arm.measured}
    pairs = ((cell, by_key.get(_key(cell.ask), {})) for cell in shown)
    return {cell.name: quantities[cell.metric] for cell, quantities in pairs if cell.metric in quantities}


def _key(ask: CellAsk) -> tuple[str, str]:
    return ask.key, ask.model


def _caveats(base: Evidence, rows: Sequence[Row], ratios_by: Collection[str]) -> Iterator[str]:
    yield f"vs {base.name} is how many times as fast, over a row's columns from the lowest to the highest"
    for row in rows:
        if row["verdict"]:
            session = f"session {alias(str(row['verdict_session']))}{ELSEWHERE if row['verdict_elsewhere'] else ''}"
            yield f"{row['step']}'s verdict against {base.name}, and its ratio, are of {session}"
    if "medians" in ratios_by:
        yield "a ratio alone is of the medians above, of sessions apart: no verdict"
    if "device" in ratios_by:
        yield f"no ratio is taken between devices: {base.name} was measured on {base.host}"


def _columns(arms: Sequence[Evidence]) -> tuple[list[_Shown], dict[str, Value]]:
    """Return the columns, operations before prompts, and their common settings."""
    cells = [cell for arm in arms for cell in arm.measured]
    asks = in_order(cells, _key)
    ops = sorted((ask for ask in asks if ask.cell.tool == BY_FORM["ops"]), key=lambda ask: rank(OPS, ask))
    streams = sorted(
        (ask for ask in asks if ask.cell.tool == BY_FORM["single-stream"]), key=lambda ask: rank(SINGLE_STREAM, ask)
    )
    alike = common([_op_words(ask) for ask in ops])
    if len(ops) == 1:  # nothing distinguishes it, but it needs a name
        alike = {key: value for key, value in alike.items() if key not in ("type_a", "n")}
    shown = []
    for ask in ops:
        have = {metric for cell in cells if _key(cell.ask) == _key(ask) for metric in cell.quantities}
        own = {key: value for key, value in _op_words(ask).items() if key not in alike}
        words = [value if isinstance(value, str) else f"{key}={value}" for key, value in own.items()]
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
