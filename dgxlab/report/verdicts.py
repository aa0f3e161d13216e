"""The report of a session of two arms: what each chain says, how it was held, and what does not count of it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.judgement import Judged
from dgxlab.model import ChainStep, Plan, RunStep
from dgxlab.report import ask as asking
from dgxlab.report.ask import CellAsk, cell_ask
from dgxlab.report.between import differences
from dgxlab.report.conditions import Row, conditions_of, flags_of, range_of
from dgxlab.report.failures import failed_session
from dgxlab.report.numbers import Mean, Value, percent
from dgxlab.report.pairs import pair_table, sessions_of_pair
from dgxlab.report.records import Because, Column, Discard, Flag, SessionReport, SessionTable, Table
from dgxlab.report.session import AT_TEMPERATURE, Session, means_of
from dgxlab.report.tables import FORMS, Form, env_text, leading, of_arms, others_of, rank, varying_of
from dgxlab.stats import SCREEN_DRIFT_LIMIT, STEPS, VERDICTS, Verdict, noise_floor

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

PREFIX = {"ab": "", "screen": "screen: ", "noise": "A/A: "}
"""What stands before every verdict of such a session, so that nobody takes it for an A/B's."""

NEITHER = (None, None)

LEVEL = re.compile(r"the 99[.\d]* % interval(?= lies above| lies below| contains)")
SAME_LEVEL = re.compile(r"the [.\d]+ % interval(?= lies inside| is not inside)")
"""How reasons name their confidence."""


def verdicts(store: Store, job: Job) -> SessionReport:
    """Return the report of a session; of its chains nothing before it has ended.

    Raises:
        UsageError: if its plan cannot be read.
    """
    session = Session(store, job, asking.plan_of(job))
    found = judgement.recorded(store, job.job_id) if session.ended else []
    words = [one.verdict.verdict for one in found]
    whole = judgement.whole(words) if words else ""
    failures = [*session.failed_gates(), *session.failed_runs()]
    pair = sessions_of_pair(store, job) if found else []
    again = f"; session {pair.index(job) + 1} of {len(pair)} of this pair" if len(pair) > 1 else ""
    return SessionReport(
        title=f"Session {job.job_id}: {session.what}",
        hypothesis=asking.hypothesis(store, job),
        tables=(*session.gate_tables(), *_chain_tables(session, found), *_beside(store, job, pair)),
        missing=(),
        failures=(*failed_session(job, failures), *failures),
        session=job.job_id,
        kind=job.kind,
        ended=session.ended,
        verdict=whole,
        counts={word: words.count(word) for word in VERDICTS if word in words},
        summary=summary(job.kind, whole, words) + _floors(job.kind, found) + again if session.ended else "",
        differences=tuple(differences(session.plan)),
        progress=() if session.ended else tuple(session.progress()),
    )


def _beside(store: Store, job: Job, pair: Sequence[Job]) -> list[Table]:
    return [pair_table(store, job, pair)] if len(pair) > 1 else []


def summary(kind: str, whole: str, words: Sequence[str]) -> str:
    """Say how many claims came out how: `faster: 2 of 6 faster, 4 inconclusive`."""
    if not words:
        return f"{PREFIX[kind]}no verdict: the session ended before there was one"
    order = sorted(set(words), key=lambda word: (word != whole, VERDICTS.index(word)))
    first, *others = (f"{words.count(word)} {word}" for word in order)
    number, _, word = first.partition(" ")
    return f"{PREFIX[kind]}{whole}: {', '.join([f'{number} of {len(words)} {word}', *others])}"


def _floors(kind: str, found: Sequence[Judged]) -> str:
    """Say what an A/A session was held for."""
    floors = sorted(floor for one in found if (floor := noise_floor(one.verdict)))
    if kind != "noise" or not floors:
        return ""
    ends = dict.fromkeys((percent(floors[0]), percent(floors[-1])))
    return f"; noise floor {' to '.join(ends)} %"


# -- chains -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """One comparison with its verdict.

    Attributes:
        chain: It is one of this chain's.
        ask: The baseline's cell.
        candidate_ask: The cell that it is compared with.
        baseline, candidate: Means of the runs in the cycles that count; None where there is no verdict.
        label: Names the row in sentences.
    """

    chain: ChainStep
    ask: CellAsk
    candidate_ask: CellAsk
    judged: Judged
    baseline: Mean | None
    candidate: Mean | None
    label: str = ""

    @property
    def verdict(self) -> Verdict:
        return self.judged.verdict


def _chain_tables(session: Session, found: Sequence[Judged]) -> list[SessionTable]:
    """Return a table for each tool and model, as in other reports."""
    chains = {chain.id: chain for chain in session.plan.chains}
    groups: dict[tuple[str, str], list[_Row]] = {}
    medians = session.medians(list(chains.values())) if found else {}
    for one in found:
        chain = chains[one.chain]
        ask, other = _ask(chain.baseline, one.comparison.baseline), _ask(chain.candidate, one.comparison.candidate)
        groups.setdefault((ask.cell.tool, FORMS[ask.cell.tool][1](ask)), []).append(
            _Row(chain, ask, other, one, *means_of(one, medians))
        )
    return [_table(session, FORMS[tool][0], title, rows) for (tool, title), rows in groups.items()]


def _ask(run: RunStep, key: str) -> CellAsk:
    return cell_ask(next(cell for cell in run.cells if cell.key == key), run.model, run.env)


def _table(session: Session, form: Form, title: str, found: Sequence[_Row]) -> SessionTable:
    ordered = sorted(found, key=lambda row: rank(form, row.ask))  # stable: the comparisons of a cell keep their order
    others = [_of_both(form, row) for row in ordered]
    varying = varying_of(others)
    both, differ = _shared({key: value for key, value in others[0].items() if key not in varying}, ordered[0])
    metrics = list(dict.fromkeys(row.judged.comparison.metric for row in ordered))
    own = [
        {
            key: one if one == two else of_arms(key, one, two)
            for key in varying
            for one, two in [other.get(key, NEITHER)]
        }
        for other in others
    ]
    leads = [{**form.lead(row.ask), **mine} for row, mine in zip(ordered, own, strict=True)]
    rows = [_with_label(row, mine, metrics) for row, mine in zip(ordered, own, strict=True)]
    values = [{**lead, **_values(session.plan.kind, row)} for lead, row in zip(leads, rows, strict=True)]
    chains = list({row.chain.id: row.chain for row in rows}.values())
    runs = session.of_chains(chains)
    models = {row.ask.model for row in rows}
    conditions = conditions_of(session.store, [run["run_id"] for run in runs])
    candidate = session.candidate
    return SessionTable(
        "verdicts",
        f"{title}: {session.what}",
        (*leading(leads, dict.fromkeys(key for lead in leads for key in lead)), *_columns(session.plan.kind, values)),
        tuple(values),
        session.origin(session.baseline, models, [row.ask.cell for row in rows]),
        both,
        range_of(conditions[run["run_id"]] for run in runs if run["arm"] == session.baseline.name),
        _flags(session.store, runs, several=len(chains) > 1),
        differ=differ,
        candidate=session.origin(candidate, models, [row.candidate_ask.cell for row in rows]) if candidate else None,
        candidate_conditions=range_of(
            conditions[r["run_id"]] for r in runs if candidate and r["arm"] == candidate.name
        ),
        protocol=_protocol(session.plan, chains, rows, runs),
        discards=tuple(_discards(rows)),
        because=tuple(_because(rows, session.plan.kind)),
    )


def _of_both(form: Form, row: _Row) -> dict[str, tuple[Value, Value]]:
    """Return what shapes a row's numbers and has no leading column, a variable by its own name: both arms' values."""
    sides = [{**others_of(form, replace(ask, env={})), **ask.env} for ask in (row.ask, row.candidate_ask)]
    return {key: (sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys((*sides[0], *sides[1]))}


def _shared(
    settings: Mapping[str, tuple[Value, Value]], row: _Row
) -> tuple[dict[str, Value], dict[str, tuple[Value, Value]]]:
    """Divide what all rows have into what both arms share, variables together as `env`, and what differs."""
    same = {key: one for key, (one, two) in settings.items() if one == two}
    env = env_text({key: str(value) for key, value in same.items() if key in row.ask.env})
    both = {key: value for key, value in same.items() if key not in row.ask.env}
    return both | ({"env": env} if env else {}), {key: pair for key, pair in settings.items() if key not in same}


def _with_label(row: _Row, varying: Mapping[str, Value], metrics: Sequence[str]) -> _Row:
    metric = units.metric(row.judged.comparison.metric).label if len(metrics) > 1 else ""
    words = (asking.label(row.ask.cell), *(f"{k}={v}" for k, v in varying.items() if v is not None), metric)
    return replace(row, label=" ".join(filter(None, words)))


def _values(kind: str, row: _Row) -> dict[str, Value]:
    """Return the columns of a verdict, and the numbers behind those that are texts."""
    judged, found, metric = row.judged, row.verdict, units.metric(row.judged.comparison.metric)
    floor = _floor(kind, judged)
    low, high = found.ci or (None, None)
    same_low, same_high = found.same_ci or (None, None)
    pairs = {"effect": found.effect, "ci_low": low, "ci_high": high, "same_low": same_low, "same_high": same_high}
    pairs |= {"mde": found.mde, "noise_floor": floor}
    return {
        "chain": row.chain.id,
        "metric": metric.name,
        "label": metric.label,
        "baseline": row.baseline,
        "candidate": row.candidate,
        "effect": None if found.effect is None else percent(found.effect, "+"),
        "interval": found.ci and _range(found.ci),
        "same": _range(found.same_ci) if found.same_ci and found.verdict not in ("faster", "slower") else None,
        "confidence": f"{100 * found.confidence:.2f} %" if found.ci else None,
        "mde": None if found.mde is None else percent(found.mde),
        "cycles": f"{found.valid_cycles} of {found.cycles}",
        "noise_floor": None if floor is None else percent(floor),
        "verdict": PREFIX[kind] + found.verdict,
        "promoted": judged.promoted,
        "valid_cycles": found.valid_cycles,
        "run_cycles": found.cycles,
        "k_to_settle": found.k_to_settle,
        "p": found.p,
        **{f"{name}_pct": None if share is None else 100 * share for name, share in pairs.items()},
    }


def _floor(kind: str, judged: Judged) -> float | None:
    """Return the noise floor that is of interest: what an A/A session was held for, or what decided on promotion."""
    if kind == "noise":
        return noise_floor(judged.verdict) or None
    if judged.verdict.noise is not None:
        return judged.verdict.noise
    return judged.noise.sigma if judged.noise else None


def _range(interval: tuple[float, float]) -> str:
    return " to ".join(percent(bound, "+") for bound in interval)


def _columns(kind: str, rows: Sequence[Mapping[str, Value]]) -> list[Column]:
    """Return the columns of verdicts; what a screen has not, and what is the same in every row, has none."""
    metric = str(rows[0]["metric"])
    confidences = {row["confidence"] for row in rows if row["confidence"]}
    level = f"{next(iter(confidences))} " if len(confidences) == 1 else ""
    every = [
        Column("label", "speed") if len({row["metric"] for row in rows}) > 1 else None,
        Column("baseline", "baseline", metric),
        Column("candidate", "candidate", metric),
        Column("effect", "effect (%)", numeric=True),
        Column("interval", f"{level}interval (%)", numeric=True) if kind != "screen" else None,
        Column("confidence", "confidence", numeric=True) if len(confidences) > 1 else None,
        Column("same", "interval of same (%)", numeric=True) if any(row["same"] for row in rows) else None,
        Column("mde", "MDE (%)", numeric=True) if kind != "screen" else None,
        Column("cycles", "cycles", numeric=True),
        Column("noise_floor", "noise floor (%)", numeric=True),
        Column("verdict", "verdict"),
        Column("promoted", "promoted") if kind == "ab" else None,
    ]
    return [column for column in every if column]


def _protocol(plan: Plan, chains: Sequence[ChainStep], rows: Sequence[_Row], runs: Sequence[Row]) -> dict[str, Value]:
    """Say how the chains were held; they all were alike."""
    first = chains[0]
    limit = min(first.drift_limit, SCREEN_DRIFT_LIMIT) if first.screen else first.drift_limit
    decided = first.screen or plan.protocol < STEPS
    floors = sorted({row.judged.noise.session for row in rows if row.judged.noise and decided})
    said: dict[str, Value] = {
        "protocol": plan.protocol,
        "cycles planned": first.cycles or f"for an effect of {100 * first.effect:g} %",
        "arms": AT_TEMPERATURE[bool(first.block_s)],
        "thermal": first.thermal,
        "drift limit": f"{100 * limit:g} %",
    }
    if pinned := dict.fromkeys(run["pinned"].strip("[]") for run in runs if run["pinned"]):
        said["pinned"] = "to processors " + " or ".join(pinned)
    return {**said, "noise floors of": ", ".join(floors)} if floors else said


def _flags(store: Store, runs: Sequence[Row], *, several: bool) -> tuple[Flag, ...]:
    """Return what speaks against runs, those of a kind together: each says how long, and so none says the same."""
    named = {run["run_id"]: f"{run['chain']} " * several + f"{run['role']} {run['cycle']}" for run in runs}
    flags = flags_of(store, list(named))
    groups: dict[tuple[bool, str], list[tuple[str, str]]] = {}
    for run_id, name in named.items():
        for flag in flags[run_id]:
            groups.setdefault((bool(flag["hard"]), flag["kind"]), []).append((name, flag["reason"]))
    found = []
    for (hard, _), of_kind in groups.items():
        labels = tuple(dict.fromkeys(name for name, _ in of_kind))
        reasons = list(dict.fromkeys(reason for _, reason in of_kind))
        more = "" if len(reasons) == 1 else f", and {len(reasons) - 1} like it"
        found.append(Flag(() if len(labels) == len(named) else labels, hard, reasons[0] + more))
    return tuple(sorted(found, key=lambda flag: not flag.hard))


def _discards(rows: Sequence[_Row]) -> list[Discard]:
    """Return the cycles that do not count, the rows of which the same is true together."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    sizes = Counter(row.chain.id for row in rows)
    for row in rows:
        for cycle, reason in row.verdict.flaws.items():
            groups.setdefault((row.chain.id, cycle, reason), []).append(row.label)
    return [
        Discard(chain, cycle, () if len(labels) == sizes[chain] else tuple(labels), reason)
        for (chain, cycle, reason), labels in sorted(groups.items())
    ]


def _without_level(found: Verdict, reason: str) -> str:
    return SAME_LEVEL.sub("the interval of same" if found.same_ci else r"\g<0>", LEVEL.sub("the interval", reason))


def _because(rows: Sequence[_Row], kind: str) -> list[Because]:
    """Return why each verdict, the rows with the same reasons together; what discards say is not said again."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for row in rows:
        flaws = {f"cycle {cycle} does not count: {flaw}" for cycle, flaw in row.verdict.flaws.items()}
        # at which confidence is in the table; here it would tell rows apart that say the same
        reasons = [_without_level(row.verdict, reason) for reason in row.verdict.reasons if reason not in flaws]
        groups.setdefault((PREFIX[kind] + row.verdict.verdict, tuple(reasons)), []).append(row.label)
    return [
        Because(verdict, () if len(labels) == len(rows) else tuple(labels), reasons)
        for (verdict, reasons), labels in groups.items()
    ]
