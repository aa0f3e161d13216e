"""The report of a session of two arms: its verdicts, how they were measured, and cycles that do not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.chains import drift_limit
from dgxlab.judgement import Judged
from dgxlab.judgement.fleets import identity
from dgxlab.judgement.names import CellAsk, told_apart, varying_of
from dgxlab.model import BASELINE, CANDIDATE, ChainStep, Plan
from dgxlab.model.reasons import Code
from dgxlab.report import ask as asking
from dgxlab.report.records import (
    Column,
    Discard,
    Number,
    Origin,
    Row,
    SessionReport,
    ShownFlag,
    Table,
    Value,
    VerdictReasons,
    grouped,
    labels_of,
)
from dgxlab.report.runs import FLAGS, VALUES, Medians, RecordRow, by_kind, by_run, conditions_of, mean_of, medians_of
from dgxlab.report.session import ChainSession, differences, older
from dgxlab.report.tables import (
    FORMS,
    Form,
    common,
    env_text,
    leading,
    of_arms,
    provenance,
    settings_of,
    sort_key,
)
from dgxlab.stats import STEPS, VERDICTS, Verdict, sigma
from dgxlab.tools import metric_label

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

MARK = {"ab": "", "screen": " (screen)", "noise": " (A/A)"}
"""By `Plan.shown_kind`, what follows its verdicts, so that they are not mistaken for those of an A/B."""


PAIR = """SELECT DISTINCT job_id FROM verdict_list
          WHERE (kind, baseline_arm, candidate_arm) IN (
              SELECT kind, baseline_arm, candidate_arm FROM verdict_list WHERE job_id = ?)
          ORDER BY intent_at, job_id"""
"""The sessions of the same kind, baseline and candidate with verdicts, oldest first."""


def collect_session(store: Store, job_id: str) -> SessionReport:
    """Return the report of a session of two arms; results of its chains are hidden until it has ended.

    Raises UsageError if there is no such session, or its plan cannot be read.
    """
    job = store.job(job_id)
    session = ChainSession(store, job)
    compared = comparisons(session) if session.ended and not job.rejected else []
    of_all = [row.verdict for row in compared]
    words, kind = [verdict.verdict for verdict in of_all], job.plan.shown_kind
    text = f"rejected: {job.rejected}" if job.rejected else summary(kind, words) if session.ended else ""
    if kind == "noise":
        by_name = {"noise": map(sigma, of_all), "noise floor": (verdict.noise for verdict in of_all)}
        known = ((name, sorted(filter(None, shares))) for name, shares in by_name.items())
        text += "".join(f"; {name} {_ends(shares)} %" for name, shares in known if shares)
    groups = grouped(((row.ask.cell.tool, FORMS[row.ask.cell.tool].title(row.ask)), row) for row in compared)
    tables = [] if job.rejected else session.gate_tables()
    tables += [_table(session, FORMS[tool], title, group) for (tool, title), group in groups.items()]
    if len(pair := _pair(store, job, compared)) > 1:
        own = [each.job for each, _ in pair].index(job) + 1
        text += f"; session {own} of {len(pair)} of this pair"
        tables += _effects(own, pair)
    return SessionReport(
        title=f"Session {job.job_id}: {session.title}",
        hypothesis=asking.hypothesis(store, job),
        tables=tuple(tables),
        missing=(),
        failures=tuple(session.failures()),
        session=job.job_id,
        kind=kind,
        ended=session.ended,
        verdict=judgement.session_verdict(words) if words else "",
        counts={word: words.count(word) for word in VERDICTS if word in words},
        summary=text,
        differences=tuple(differences(session.plan)),
        progress=() if session.ended else tuple(session.progress()),
    )


def summary(kind: str, words: Sequence[str]) -> str:
    """Return a session's verdict, and how many comparisons have which of `words`: `faster: 2 of 6 faster, 4 same`."""
    if not words:
        return f"no verdict{MARK[kind]}: the session ended before there was one"
    whole = judgement.session_verdict(words)
    order = sorted(set(words), key=lambda word: (word != whole, VERDICTS.index(word)))
    first, *others = ((words.count(word), word) for word in order)
    counts = [f"{first[0]} of {len(words)} {first[1]}", *(f"{count} {word}" for count, word in others)]
    return f"{whole}{MARK[kind]}: {', '.join(counts)}"


def _ends(shares: Sequence[float]) -> str:
    """Return the first and last of sorted shares in percent; only one if both look the same."""
    return " to ".join(dict.fromkeys(f"{100 * share:.2f}" for share in (*shares[:1], *shares[-1:])))


def _in_percent(verdict: Verdict) -> dict[str, Value]:
    low, high = verdict.ci or (None, None)
    same_low, same_high = verdict.same_ci or (None, None)
    shares = {"effect": verdict.effect, "ci_low": low, "ci_high": high, "same_low": same_low, "same_high": same_high}
    return {f"{name}_pct": None if share is None else 100 * share for name, share in shares.items()}


_Pair = list[tuple[ChainSession, dict[tuple[str, ...], "Claim"]]]
"""Sessions of a pair, the oldest first, with what each compared."""


def _pair(store: Store, job: Job, compared: Sequence[Claim]) -> _Pair:
    """Return the sessions of a job's pair that compared one of the same things, the job's own too."""
    sessions = [ChainSession(store, store.job(row["job_id"])) for row in store.rows(PAIR, (job.job_id,))]
    pair = [(session, {row.identity: row for row in comparisons(session)}) for session in sessions if compared]
    return [(session, rows) for session, rows in pair if rows.keys() & {row.identity for row in compared}]


def _effects(own: int, pair: _Pair) -> Iterator[Table]:
    """Yield a row for each comparison of session `own`, with its effect in each other session of the pair that has any.

    Sessions are numbered from 1. If no other session has an effect, there is no table.
    """
    known = [any(row.verdict.effect is not None for row in of_session.values()) for _, of_session in pair]
    shown = {n: each for n, each in enumerate(pair, 1) if n == own or known[n - 1]}
    if len(shown) == 1:
        return
    names = []
    for row in shown[own][1].values():
        metric = metric_label(row.ask.cell.tool, row.judged.comparison.metric)
        names.append(" ".join(filter(None, (row.ask.model, asking.label(row.ask.cell), metric))))
    names = told_apart(names, [row.ask for row in shown[own][1].values()])
    rows: list[dict[str, Value]] = []
    for key, name in zip(shown[own][1], names, strict=True):
        rows.append({"cell": name})
        for number, (each, of_session) in shown.items():
            if key in of_session:
                verdict = of_session[key].verdict
                word = verdict.verdict + MARK[each.job.plan.shown_kind]
                effect = "" if verdict.effect is None else units.change(verdict.effect)
                around = f"({units.interval(verdict.interval)})" if verdict.interval else ""
                rows[-1][f"effect.{number}"] = " ".join(filter(None, (effect, around, word)))
                rows[-1] |= {f"{name}.{number}": value for name, value in _in_percent(verdict).items()}
    columns, origins = [Column("cell", "cell")], {}
    for number, (each, _) in shown.items():
        label = f"session {number}{older(each.job.protocol)}"
        columns.append(Column(f"effect.{number}", label + ", this one" * (number == own)))
        origins[number] = Origin(label, provenance(each.candidate or each.baseline, [each.job.job_id]))
    note = "effect with the interval that decides, in % of the baseline; the lines above are of the candidate"
    note += f"; sessions without one are left out: {len(pair) - len(shown)}" if len(shown) < len(pair) else ""
    of_own = origins.pop(own).provenance  # a source already, of the tables above
    title = f"Effects in {len(shown)} sessions of this pair"
    yield Table(
        "verdicts",
        title,
        tuple(columns),
        tuple(rows),
        of_own,
        kind="arms",
        notes=(note,),
        origins=tuple(origins.values()),
    )


@dataclass(frozen=True)
class Claim:
    """A verdict of a session, with what it compares."""

    chain: ChainStep
    ask: CellAsk
    candidate_ask: CellAsk
    judged: Judged
    label: str = ""  # names the row in sentences

    @property
    def verdict(self) -> Verdict:
        """The verdict itself."""
        return self.judged.verdict

    @property
    def identity(self) -> tuple[str, ...]:
        """What identifies it in every session of a pair: cells, environments, metric and model."""
        return identity(self.chain, self.judged)


def comparisons(session: ChainSession) -> list[Claim]:
    """Return the verdicts of a session with what each compares, in the order of its plan."""
    chains = {chain.id: chain for chain in session.plan.chains}
    rows = []
    for judged in judgement.recorded(session.store, session.job.job_id):
        chain, comparison = chains[judged.chain], judged.comparison
        sides = ((chain.baseline, comparison.baseline), (chain.candidate, comparison.candidate))
        asks = [next(CellAsk(cell, run.model, run.env) for cell in run.cells if cell.key == key) for run, key in sides]
        rows.append(Claim(chain, asks[0], asks[1], judged))
    return rows


def _table(session: ChainSession, form: Form, title: str, group: Sequence[Claim]) -> Table:
    kind, candidate = session.plan.shown_kind, session.candidate
    group = sorted(group, key=lambda row: sort_key(form, row.ask))  # stable: the comparisons of a cell keep their order
    others = [_of_both(form, row) for row in group]
    settings, varying = common(others), varying_of(others)
    both = {key: left for key, (left, right) in settings.items() if left == right}
    env = env_text({key: str(value) for key, value in both.items() if key in group[0].ask.env})
    leads: list[Row] = []
    several = len({row.judged.comparison.metric for row in group}) > 1
    for number, (row, other) in enumerate(zip(group, others, strict=True)):
        sides = {key: other.get(key, (None, None)) for key in varying}
        own = {key: left if left == right else of_arms(key, left, right) for key, (left, right) in sides.items()}
        leads.append({**form.lead(row.ask), **own})
        metric = units.metric(row.judged.comparison.metric).label if several else ""
        words = (asking.label(row.ask.cell), *(f"{k}={v}" for k, v in own.items() if v is not None), metric)
        group[number] = replace(row, label=" ".join(filter(None, words)))
    chains = {row.chain.id: row.chain for row in group}
    runs = session.of_chains(chains)
    values = by_run(session.store, VALUES, (run["run_id"] for run in runs if run["status"] == "valid"))
    medians = medians_of(row for of_run in values.values() for row in of_run)
    rows = [{**lead, **_values(kind, row, medians)} for lead, row in zip(leads, group, strict=True)]
    jobs, models = [session.job.job_id], {row.ask.model for row in group}
    conditions = [
        conditions_of(session.store, [run["run_id"] for run in runs if arm and run["arm"] == arm.name])
        for arm in (session.baseline, candidate)
    ]
    return Table(
        "verdicts",
        f"{title}: {session.title}",
        (*leading(leads, dict.fromkeys(key for lead in leads for key in lead)), *_columns(kind, rows)),
        tuple(rows),
        provenance(session.baseline, jobs, models, [row.ask.cell for row in group]),
        {key: value for key, value in both.items() if key not in group[0].ask.env} | ({"env": env} if env else {}),
        conditions[0],
        _flags(session, runs, several=len(chains) > 1),
        kind="session",
        differ={key: values for key, values in settings.items() if key not in both},
        candidate=provenance(candidate, jobs, models, [row.candidate_ask.cell for row in group]) if candidate else None,
        candidate_conditions=conditions[1],
        protocol=_protocol(session.plan, list(chains.values()), group, runs),
        discards=tuple(_discards(group)),
        because=tuple(_because(group, kind)),
    )


def _of_both(form: Form, row: Claim) -> dict[str, tuple[Value, Value]]:
    """Return the settings that are in no leading column, environment variables by name, with both arms' values."""
    sides = [{**settings_of(form, replace(ask, env={})), **ask.env} for ask in (row.ask, row.candidate_ask)]
    return {key: (sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys((*sides[0], *sides[1]))}


def _values(kind: str, row: Claim, medians: Medians) -> dict[str, Value]:
    """Return the values of a row of verdicts, also as plain numbers for JSON; `medians` are those of all runs."""
    judged, verdict, metric = row.judged, row.verdict, units.metric(row.judged.comparison.metric)

    def mean(role: str, ask: CellAsk) -> Number | None:
        key = (row.chain.id, role, ask.cell.key, metric.name)
        return None if verdict.verdict == "invalid" else mean_of(judged, role, metric.name, medians[key])

    noise = sigma(verdict) or None
    if kind != "noise":  # what decided: a screen, or before protocol 3 promotion
        noise = judged.noise.sigma if verdict.noise is None and judged.noise else None
    return {
        "chain": row.chain.id,
        "metric": metric.name,
        "label": metric.label,
        "baseline": mean(BASELINE, row.ask),
        "candidate": mean(CANDIDATE, row.candidate_ask),
        "effect": None if verdict.effect is None else units.change(verdict.effect),
        "interval": verdict.interval and units.interval(verdict.interval),
        "same": units.interval(verdict.same_ci) if verdict.same_ci and verdict.verdict == "inconclusive" else None,
        "confidence": f"{100 * verdict.confidence:.2f} %" if verdict.verdict != "same" and verdict.ci else None,
        "mde": None if verdict.mde is None else f"{100 * verdict.mde:.2f}",
        "cycles": f"{verdict.valid_cycles} of {verdict.cycles}",
        "noise": None if noise is None else f"{100 * noise:.2f}",
        "noise_floor": None if verdict.noise is None else f"{100 * verdict.noise:.2f}",
        "verdict": verdict.verdict + MARK[kind],
        "promoted": judged.promoted,
        "valid_cycles": verdict.valid_cycles,
        "run_cycles": verdict.cycles,
        "k_to_settle": verdict.k_to_settle,
        "p": verdict.p,
        **_in_percent(verdict),
        "mde_pct": None if verdict.mde is None else 100 * verdict.mde,
        "noise_pct": None if noise is None else 100 * noise,
        "noise_floor_pct": None if verdict.noise is None else 100 * verdict.noise,
    }


def _columns(kind: str, rows: Sequence[Mapping[str, Value]]) -> list[Column]:
    metric = str(rows[0]["metric"])
    every = [
        Column("label", "speed") if len({row["metric"] for row in rows}) > 1 else None,
        Column("verdict", "verdict"),
        Column("effect", "effect (%)", numeric=True),
        Column("interval", "interval (%)", numeric=True) if kind != "screen" else None,
        Column("baseline", "baseline", metric),
        Column("candidate", "candidate", metric),
        Column("promoted", "promoted") if kind == "ab" else None,
        Column("confidence", "confidence", numeric=True) if kind != "screen" else None,
        Column("same", "equivalence interval (%)", numeric=True) if any(row["same"] for row in rows) else None,
        Column("mde", "detectable (%)", numeric=True) if kind != "screen" else None,
        Column("cycles", "cycles", numeric=True),
        Column("noise", "noise (%)", numeric=True) if any(row["noise"] for row in rows) else None,
        Column("noise_floor", "noise floor (%)", numeric=True) if kind != "screen" else None,
    ]
    return [column for column in every if column]


def _protocol(
    plan: Plan, chains: Sequence[ChainStep], group: Sequence[Claim], runs: Sequence[RecordRow]
) -> dict[str, Value]:
    first = chains[0]
    decided = first.screen or plan.protocol < STEPS
    measured = sorted({row.judged.noise.session for row in group if row.judged.noise and decided})
    words: dict[str, Value] = {
        "protocol": plan.protocol,
        "cycles planned": first.cycles or f"for an effect of {100 * first.effect:g} %",
        # without blocks the alternating arms heat one another
        "arms": "each at its own temperature" if first.block_s else "at shared temperature",
        "thermal": first.thermal,
        "drift limit": f"{100 * drift_limit(first):g} %",
    }
    if pinned := dict.fromkeys(run["pinned"].strip("[]") for run in runs if run["pinned"]):
        words["pinned"] = "to processors " + " or ".join(pinned)
    return {**words, "noise of": ", ".join(measured)} if measured else words


def _flags(session: ChainSession, runs: Sequence[RecordRow], *, several: bool) -> tuple[ShownFlag, ...]:
    named = {run["run_id"]: f"{run['chain']} " * several + f"{run['role']} {run['cycle']}" for run in runs}
    flags = by_run(session.store, FLAGS, named).values()
    results = []
    for of_kind, reason in by_kind(flag for of_run in flags for flag in of_run):
        labels = list(dict.fromkeys(named[flag["run_id"]] for flag in of_kind))
        first = of_kind[0]
        plain = first["kind"] == Code.TOO_SHORT.key  # nothing else tells that such runs could not be watched
        shown = ShownFlag(labels_of(labels, len(named)), bool(first["hard"]), reason, plain, (session.job.job_id,))
        results.append(shown)
    return tuple(sorted(results, key=lambda flag: not flag.hard))


def _discards(group: Sequence[Claim]) -> list[Discard]:
    sizes = Counter(row.chain.id for row in group)
    groups = grouped(
        ((row.chain.id, cycle, reason), row.label) for row in group for cycle, reason in row.verdict.flaws.items()
    )
    return [
        Discard(chain, cycle, labels_of(labels, sizes[chain]), reason)
        for (chain, cycle, reason), labels in sorted(groups.items())
    ]


def _because(group: Sequence[Claim], kind: str) -> Iterator[VerdictReasons]:
    def reasons(verdict: Verdict) -> tuple[str, ...]:
        # without the confidence, which is in the table: it would split rows of equal reasons
        first = (_deciding(verdict),) if verdict.ci else ()
        return (*first, *judgement.reasons(verdict)[len(first) :])

    groups = grouped(((row.verdict.verdict, reasons(row.verdict)), row) for row in group)
    for (verdict, why), rows in groups.items():
        mdes = sorted(row.verdict.mde for row in rows if row.verdict.mde is not None)
        mde = (f"smallest detectable effect {_ends(mdes)} %",) if verdict == "inconclusive" and mdes else ()
        yield VerdictReasons(verdict + MARK[kind], labels_of([row.label for row in rows], len(group)), (*why, *mde))


def _deciding(verdict: Verdict) -> str:
    """Return the first reason of a verdict without the confidence of its intervals."""
    equivalence = "the equivalence interval" if verdict.same_ci else "the 90 % interval"  # fixed in older protocols
    if verdict.verdict == "same":
        return f"{equivalence} lies inside ±1 %"
    if verdict.verdict == "inconclusive":
        return f"the interval contains 0, and {equivalence} is not inside ±1 %"
    return f"the interval lies {'above' if (verdict.effect or 0.0) > 0 else 'below'} 0"
