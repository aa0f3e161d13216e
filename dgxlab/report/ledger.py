"""Tables of what was tried: the steps of a kernel's development, and the experiments with a hypothesis."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.errors import UsageError
from dgxlab.judgement import NOT_PROMOTED, Judged
from dgxlab.judgement.names import CellAsk
from dgxlab.report import ask as asking
from dgxlab.report.arms import by_environment, distinct_asks, of_forms, settings_with_model, side_by_side
from dgxlab.report.ask import Query, op_params
from dgxlab.report.beside import fits, matching_series, rows_beside
from dgxlab.report.evidence import Evidence, arms_of_job, find_evidence
from dgxlab.report.records import Column, Number, Origin, Provenance, Row, Table, Value, columns, grouped
from dgxlab.report.session import WORDS, invalid_since, newest_with_verdicts, older
from dgxlab.report.tables import OPS, SINGLE_STREAM, common, provenance, sort_key
from dgxlab.report.verdicts import MARK
from dgxlab.stats import VERDICTS, speedup
from dgxlab.store import REJECTED, alias
from dgxlab.tools import BY_FORM
from dgxlab.tools.llama_bench import name_of_test

if TYPE_CHECKING:
    from dgxlab.store import Job, Store


@dataclass(frozen=True)
class _Outcome:
    """The result of the newest comparison of a candidate with a baseline."""

    session: str
    baseline: str
    kind: str  # ab or screen
    protocol: int
    word: str  # for the whole session
    promoted: bool  # at least one claim is promoted, and none is slower or invalid
    why: str
    gains: Mapping[tuple[str, str], float]  # speedup factors, by the candidate's cell and metric
    newer: Job | None  # a newer session of the same, which is invalid

    @property
    def shown(self) -> str:
        """The word, marked if from a screen or from an older protocol."""
        return self.word + MARK[self.kind] + older(self.protocol)

    @property
    def against(self) -> str:
        """The word with its marks and the baseline, for tables whose rows may each have another."""
        return f"{self.shown} against {self.baseline}"


def _newest_outcome(store: Store, candidate: str, baseline: str = "") -> _Outcome | None:
    job, newer = newest_with_verdicts(store, candidate, baseline)
    if job is None or job.plan.shown_kind == "noise":
        return None
    judged = judgement.recorded(store, job.job_id)
    verdicts = [each.verdict for each in judged]
    word = judgement.session_verdict([verdict.verdict for verdict in verdicts])
    promoted = word == "faster" and any(each.promoted for each in judged)
    gains = {
        (each.comparison.candidate, each.comparison.metric): 1 + speedup(each.verdict.effect, each.verdict.better)
        for each in judged
        if each.verdict.effect is not None
    }
    about = (job.job_id, judged[0].baseline_arm, job.kind, job.protocol)
    return _Outcome(*about, word, promoted, "; ".join(_because(judged)), gains, newer)


def _because(judged: Sequence[Judged]) -> Iterator[str]:
    groups = grouped(((each.verdict.verdict, each.promoted), each.verdict) for each in judged)
    for word, promoted in sorted(groups, key=lambda key: (VERDICTS.index(key[0]), not key[1])):
        verdicts = groups[word, promoted]
        gains = sorted(speedup(each.effect, each.better) for each in verdicts if each.effect is not None)
        ends = dict.fromkeys(units.change(gain) for gain in gains[:1] + gains[-1:])
        around = f" ({' to '.join(ends)} % in speed)" if ends else ""
        first = next((reason for each in verdicts for reason in judgement.reasons(each)), "")
        reasons = (reason for each in verdicts for reason in each.reasons)
        held = next((reason for reason in reasons if reason.startswith(NOT_PROMOTED)), "")
        why = ", ".join(dict.fromkeys(filter(None, (first if word == "invalid" else "", held))))
        label = f"{word} and promoted" if promoted else word
        yield f"{len(verdicts)} of {len(judged)} {label}{around}" + (f": {why}" if why else "")


STATUS = {
    "faster": "faster, not promoted",
    "mixed": "faster and slower",
    "slower": "dead end",
    "same": "dead end",
    "inconclusive": "undecided",
    "invalid": "undecided",
}
"""An experiment's status by the verdict of its newest A/B session, unless it is promoted."""


OF_EXPERIMENT = "kind <> 'noise' AND experiment IN (SELECT digest FROM experiments WHERE experiments.name = :name)"
"""SQL condition: the jobs of an experiment, alone or as the candidate."""
_OF_ARM = "state = 'done' AND job_id IN (SELECT job_id FROM runs WHERE arm = :name AND status = 'valid')"


def experiments(store: Store, wanted: Query) -> Table:
    """Return the table of experiments with a hypothesis, in the order tried: status, newest verdict, reason."""
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
    origins, notes = [], []
    for name in names:
        latest = asking.newest(store, OF_EXPERIMENT, f"job_id IN ({REJECTED})", name=name)
        # others may have been compared with it
        latest = latest or asking.newest(store, _OF_ARM, f"job_id IN ({REJECTED})", name=name)
        outcome = _newest_outcome(store, name)
        if outcome and outcome.newer:
            notes.append(f"{name}: {invalid_since(store, outcome.newer)}")
            latest = None if latest == outcome.newer else latest
        row = _status(outcome, latest)
        rows.append({"lever": name, "hypothesis": hypotheses[name], **row})
        if "session" in row:
            job = store.job(str(row["session"]))
            origins.append(Origin(name, provenance(arms_of_job(store, job)[name], [job.job_id])))
    first = origins[0].provenance if origins else Provenance(names[0])
    shown = columns("lever hypothesis status verdict why session", verdict="newest verdict")
    table = Table("levers", "Levers", shown, tuple(rows), first, kind="arms", notes=tuple(notes))
    return replace(table, origins=tuple(origins))


def _status(outcome: _Outcome | None, latest: Job | None) -> Row:
    """Return an experiment's status, verdict, reason and session: of `latest` if that failed, else of the outcome."""
    state = latest.state if latest else ""
    if outcome is not None and state not in ("failed", "lost"):
        status = STATUS[outcome.word]
        if state in ("intended", "running"):
            status = "being measured"
        elif outcome.promoted:
            status = "promoted"
        elif outcome.kind == "screen":  # a screen can reject, never accept
            status = "dead end" if outcome.word in ("slower", "same") else "screened"
        return {"verdict": outcome.against, "why": outcome.why, "session": outcome.session, "status": status}
    if latest is None:
        return {"status": "not measured"}
    status, why = state, latest.error
    if state in ("intended", "running"):
        status, why = "being measured", ""
    if state == "done":
        status, why = "measured", "no A/B session judged it"
    verdict = outcome.against if outcome else None
    return {"verdict": verdict, "why": why, "session": latest.job_id, "status": status}


_Shown = Mapping[Column, CellAsk]
"""Each column with its cell, as one of the steps asks for it: in a column it is the same one in any environment."""


def steps(store: Store, wanted: Query) -> Table:
    """Return the table of steps: a row for each experiment in the order given, its ratio to the baseline, its verdict.

    A baseline that is not among the experiments comes first.
    """
    names = wanted.experiment
    if wanted.baseline and wanted.baseline not in names:
        names = (wanted.baseline, *names)
    arms = by_environment(of_forms(store, replace(wanted, experiment=names), "ops", "single-stream"))
    experiments = [arm.experiment for arm in arms]
    outcomes: dict[str, _Outcome] = {}
    for number, arm in enumerate(arms):
        # a verdict is of an experiment, not of one of its environments
        alone = experiments.count(arm.experiment) == 1
        if alone and (outcome := _newest_outcome(store, arm.experiment, wanted.baseline)):
            outcomes[arm.name] = outcome
            # the numbers are those of the session that judged it: the verdict is about them
            of_session = find_evidence(store, replace(arm.ask, session=outcome.session)).measured
            judged = {cell.ask.identity: cell for cell in of_session}
            arms[number] = replace(arm, measured=tuple(judged.get(cell.ask.identity, cell) for cell in arm.measured))
    shown, settings = _columns(arms)
    base = next((arm for arm in arms if arm.experiment == wanted.baseline), None)
    ratios = [_ratio(arm, base, shown, outcomes.get(arm.name)) for arm in arms]
    rows: list[Row] = []
    for arm, (ratio, _) in zip(arms, ratios, strict=True):
        outcome = outcomes.get(arm.name)
        row: dict[str, Value] = {"step": arm.name, **_quantities(arm, shown), "ratio": ratio}
        row |= {"notes": arm.ask.hypothesis, "verdict": None, "verdict_session": None, "verdict_elsewhere": None}
        if outcome:
            elsewhere = outcome.session not in {cell.run["job_id"] for cell in arm.measured}
            word = outcome.shown if base else outcome.against
            row |= {"verdict": word, "verdict_session": outcome.session, "verdict_elsewhere": elsewhere}
        rows.append(row)
    heads = [Column("step", "step"), *shown]
    heads += [Column("ratio", f"vs {base.name}", numeric=True)] if base else []
    heads += [Column("verdict", "A/B verdict")] if outcomes else []
    heads.append(Column("notes", "notes"))
    notes = list(_caveats(base, rows, {by for _, by in ratios}) if base else ())
    notes += [f"{name}: {invalid_since(store, each.newer)}" for name, each in outcomes.items() if each.newer]
    table = side_by_side("steps", "Steps", arms, heads, rows, settings=settings, notes=notes)

    def column_of(published: Row) -> str | None:
        cells = {column.key: ask.cell.params for column, ask in shown.items() if column.metric in ("flops", "avg_ts")}
        fitting = [
            key
            for key, params in cells.items()
            if fits(published, {"op": params.get("op_name"), "test": name_of_test(params), **params})
        ]
        return fitting[0] if len(fitting) == 1 else None

    return rows_beside(matching_series(wanted.form, wanted.published), table, column_of)


def _ratio(arm: Evidence, base: Evidence | None, shown: _Shown, outcome: _Outcome | None) -> tuple[str | None, str]:
    """Return a step's speedup over the baseline as text, and where it comes from.

    That is "verdict", "medians" (of different sessions), or "device": there is no ratio between devices.
    """
    if base is None or arm is base:
        return "baseline" if base else None, ""
    compared = {
        (ask.cell.key, "time_us" if ask.cell.tool == BY_FORM["ops"] else column.metric) for column, ask in shown.items()
    }
    if outcome and (gains := [gain for key, gain in outcome.gains.items() if key in compared]):
        return f"{_ends(gains)} ({WORDS[outcome.kind]})", "verdict"
    if arm.device != base.device:
        return "of another device", "device"
    mine, others = _quantities(arm, shown), _quantities(base, shown)
    ratios = []
    for column in shown:
        if column.key in mine and column.key in others:
            share = mine[column.key].middle / others[column.key].middle
            ratios.append(share if units.metric(column.metric).better == "higher" else 1 / share)
    return (_ends(ratios), "medians") if ratios else (None, "")


def _ends(ratios: Sequence[float]) -> str:
    return " to ".join(dict.fromkeys(f"{share:.2f}x" for share in (min(ratios), max(ratios))))


def _quantities(arm: Evidence, shown: _Shown) -> dict[str, Number]:
    by_cell = {cell.ask.identity[:2]: cell.quantities for cell in arm.measured}
    pairs = ((column, by_cell.get(ask.identity[:2], {})) for column, ask in shown.items())
    return {column.key: quantities[column.metric] for column, quantities in pairs if column.metric in quantities}


def _caveats(base: Evidence, rows: Sequence[Row], ratios_by: Collection[str]) -> Iterator[str]:
    yield f"vs {base.name} is how many times as fast, over a row's columns from the lowest to the highest"
    for row in rows:
        if row["verdict"]:
            elsewhere = ", which did not measure the row's numbers"
            session = alias(str(row["verdict_session"])) + (elsewhere if row["verdict_elsewhere"] else "")
            yield f"{row['step']}'s verdict against {base.name}, and its ratio, are of session {session}"
    if "medians" in ratios_by:
        yield "a ratio alone is of the medians above, of sessions apart: no verdict"
    if "device" in ratios_by:
        yield f"no ratio is taken between devices: {base.name} was measured on {base.host}"


def _columns(arms: Sequence[Evidence]) -> tuple[_Shown, dict[str, Value]]:
    """Return the columns, operations before prompts, and their common settings."""
    cells = [cell for arm in arms for cell in arm.measured]
    by_tool = grouped((ask.cell.tool, ask) for ask in distinct_asks(cells, lambda ask: ask.identity[:2]))
    ops = sorted(by_tool.get(BY_FORM["ops"], []), key=partial(sort_key, OPS))
    streams = sorted(by_tool.get(BY_FORM["single-stream"], []), key=partial(sort_key, SINGLE_STREAM))
    shown: dict[Column, CellAsk] = {}

    def show(ask: CellAsk, label: str, metric: str) -> None:
        shown[Column(" ".join(filter(None, ask.identity[:2])), label, metric)] = ask

    params = [ask.cell.params for ask in ops]
    words_of = [{"op": each.get("op_name"), "backend": each.get("backend_name"), **op_params(each)} for each in params]
    alike = common(words_of)
    if len(ops) == 1:  # nothing distinguishes it, but it needs a name
        alike = {key: value for key, value in alike.items() if key not in ("type_a", "n")}
    for ask, words in zip(ops, words_of, strict=True):
        measured = {metric for cell in cells if cell.ask.identity[:2] == ask.identity[:2] for metric in cell.quantities}
        own = {key: value for key, value in words.items() if key not in alike}
        label = " ".join(value if isinstance(value, str) else f"{key}={value}" for key, value in own.items())
        first = next((metric for metric in ("flops", "bandwidth_gb_s", "time_us") if metric in measured), "")
        if first:
            show(ask, label, first)
    settings = [settings_with_model(SINGLE_STREAM, ask) for ask in streams]
    shared = common(settings)
    for ask, others in zip(streams, settings, strict=True):
        more = [f"{key}={value}" for key, value in others.items() if key not in shared]
        show(ask, " ".join([name_of_test(ask.cell.params), *more]), "avg_ts")
    return shown, {**alike, **shared}
