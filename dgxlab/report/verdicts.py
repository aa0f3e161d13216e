"""The report of a session of two arms: verdicts, how they were measured, and cycles that do not count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.judgement import Judged
from dgxlab.model import ChainStep, Plan, RunStep
from dgxlab.report import ask as asking
from dgxlab.report.ask import CellAsk
from dgxlab.report.evidence import FLAGS, Row, by_kind, by_run, conditions_of
from dgxlab.report.records import Because, Column, Discard, Flag, Number, Origin, SessionReport, Table, Value
from dgxlab.report.session import ChainSession, differences, means_of, older
from dgxlab.report.tables import FORMS, Form, env_text, leading, of_arms, others_of, rank, varying_of
from dgxlab.stats import SCREEN_DRIFT_LIMIT, STEPS, VERDICTS, Verdict, noise_floor
from dgxlab.tools import BENCHES

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

PREFIX = {"ab": "", "screen": "screen: ", "noise": "A/A: "}
"""Prefix of verdicts by kind of session, so that they are not mistaken for A/B verdicts."""

AT_TEMPERATURE = ("at shared temperature", "each at its own temperature")
"""Thermal condition of ordinary chains, whose alternating arms heat one another, and of chains with blocks."""


def verdicts(store: Store, job: Job) -> SessionReport:
    """Return the report of a session; its chains are hidden until it has ended.

    Raises:
        UsageError: if its plan cannot be read.
    """
    session = ChainSession(store, job, asking.plan_of(job))
    judged = judgement.recorded(store, job.job_id) if session.ended else []
    words = [each.verdict.verdict for each in judged]
    whole = judgement.whole(words) if words else ""
    text = summary(job.kind, whole, words) if session.ended else ""
    floors = sorted(floor for each in judged if (floor := noise_floor(each.verdict)))
    if job.kind == "noise" and floors:
        text += f"; noise floor {_ends(floors)} %"
    pair = _sessions_of_pair(store, job) if judged else []
    if len(pair) > 1:
        text += f"; session {pair.index(job) + 1} of {len(pair)} of this pair"
    beside = [_pair_table(store, job, pair)] if len(pair) > 1 else []
    return SessionReport(
        title=f"Session {job.job_id}: {session.what}",
        hypothesis=asking.hypothesis(store, job),
        tables=(*session.gate_tables(), *_chain_tables(session, judged), *beside),
        missing=(),
        failures=tuple(session.failures()),
        session=job.job_id,
        kind=job.kind,
        ended=session.ended,
        verdict=whole,
        counts={word: words.count(word) for word in VERDICTS if word in words},
        summary=text,
        differences=tuple(differences(session.plan)),
        progress=() if session.ended else tuple(session.progress()),
    )


def summary(kind: str, whole: str, words: Sequence[str]) -> str:
    """Return the number of claims per verdict: `faster: 2 of 6 faster, 4 inconclusive`."""
    if not words:
        return f"{PREFIX[kind]}no verdict: the session ended before there was one"
    order = sorted(set(words), key=lambda word: (word != whole, VERDICTS.index(word)))
    first, *others = ((words.count(word), word) for word in order)
    counts = [f"{first[0]} of {len(words)} {first[1]}", *(f"{count} {word}" for count, word in others)]
    return f"{PREFIX[kind]}{whole}: {', '.join(counts)}"


def _ends(shares: Sequence[float]) -> str:
    """Return the first and last of sorted shares in percent; only one if both look the same."""
    return " to ".join(dict.fromkeys(percent(share) for share in (*shares[:1], *shares[-1:])))


def percent(share: float, sign: str = "") -> str:
    """Return a share in percent: `0.59`; `+59.19` with a sign, except for 0."""
    shown = f"{100 * share:{sign}.2f}"
    return "0.00" if shown in ("+0.00", "-0.00") else shown


def _range(interval: tuple[float, float]) -> str:
    return " to ".join(percent(bound, "+") for bound in interval)


def _in_percent(verdict: Verdict) -> dict[str, Value]:
    low, high = verdict.ci or (None, None)
    same_low, same_high = verdict.same_ci or (None, None)
    shares = {"effect": verdict.effect, "ci_low": low, "ci_high": high, "same_low": same_low, "same_high": same_high}
    return {f"{name}_pct": None if share is None else 100 * share for name, share in shares.items()}


Key = tuple[str, ...]
"""Identity of a comparison: cells, metric, model and environments."""


def _sessions_of_pair(store: Store, job: Job) -> list[Job]:
    """Return the sessions of the same kind, baseline and candidate with verdicts, oldest first."""
    rows = store.rows(
        """SELECT DISTINCT job_id, intent_at FROM verdict_list
           WHERE (kind, baseline_arm, candidate_arm) IN (
               SELECT kind, baseline_arm, candidate_arm FROM verdict_list WHERE job_id = ?)
           ORDER BY intent_at, job_id""",
        (job.job_id,),
    )
    return [store.job(row["job_id"]) for row in rows]


def _pair_table(store: Store, job: Job, sessions: Sequence[Job]) -> Table:
    """Return a row for each comparison of a session, with its effect in each session of the pair."""
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
    return Table(
        "verdicts",
        f"Effects in the {len(sessions)} sessions of this pair",
        (Column("cell", "cell"), *columns),
        tuple(rows),
        origins[own].provenance,
        kind="arms",
        notes=("effect with the interval that decides, in % of the baseline; the lines above are of the candidate",),
        origins=tuple(origins),
    )


def _comparisons(store: Store, job: Job) -> Iterator[tuple[Key, tuple[ChainStep, Judged]]]:
    chains = {chain.id: chain for chain in asking.plan_of(job).chains}
    for judged in judgement.recorded(store, job.job_id):
        chain, comparison = chains[judged.chain], judged.comparison
        around = (judged.model_id or "", env_text(chain.baseline.env), env_text(chain.candidate.env))
        yield (comparison.baseline, comparison.candidate, comparison.metric, *around), (chain, judged)


def _compared(chain: ChainStep, judged: Judged) -> str:
    cell = next(cell for cell in chain.baseline.cells if cell.key == judged.comparison.baseline)
    metric = units.metric(judged.comparison.metric).label if len(BENCHES[cell.tool].compared) > 1 else ""
    return " ".join(filter(None, (chain.baseline.model, asking.label(cell), metric)))


def _effect(number: int, verdict: Verdict) -> Mapping[str, Value]:
    """Return the effect in one session, in words and as numbers."""
    words = ["" if verdict.effect is None else percent(verdict.effect, "+")]
    words += [f"({_range(verdict.interval)})"] if verdict.interval else []
    numbers = {f"{name}.{number}": value for name, value in _in_percent(verdict).items()}
    return {f"effect.{number}": " ".join(filter(None, (*words, verdict.verdict))), **numbers}


@dataclass(frozen=True)
class _Comparison:
    """One comparison of a chain with its verdict, and the means of both arms if valid."""

    chain: ChainStep
    ask: CellAsk
    candidate_ask: CellAsk
    judged: Judged
    baseline: Number | None
    candidate: Number | None
    label: str = ""  # names the row in sentences

    @property
    def verdict(self) -> Verdict:
        return self.judged.verdict


def _chain_tables(session: ChainSession, judged: Sequence[Judged]) -> list[Table]:
    """Return a table for each tool and model, as in other reports."""
    chains = {chain.id: chain for chain in session.plan.chains}
    groups: dict[tuple[str, str], list[_Comparison]] = {}
    medians = session.medians() if judged else {}
    for each in judged:
        chain = chains[each.chain]
        ask, other = _ask(chain.baseline, each.comparison.baseline), _ask(chain.candidate, each.comparison.candidate)
        comparison = _Comparison(chain, ask, other, each, *means_of(each, medians))
        groups.setdefault((ask.cell.tool, FORMS[ask.cell.tool].title(ask)), []).append(comparison)
    return [_table(session, FORMS[tool], title, group) for (tool, title), group in groups.items()]


def _ask(run: RunStep, key: str) -> CellAsk:
    return CellAsk.of(next(cell for cell in run.cells if cell.key == key), run.model, run.env)


def _table(session: ChainSession, form: Form, title: str, group: Sequence[_Comparison]) -> Table:
    kind, candidate = session.plan.kind, session.candidate
    group = sorted(group, key=lambda row: rank(form, row.ask))  # stable: the comparisons of a cell keep their order
    others = [_of_both(form, row) for row in group]
    varying = varying_of(others)
    own = [_own(other, varying) for other in others]
    settings = {key: values for key, values in others[0].items() if key not in varying}
    both = {key: left for key, (left, right) in settings.items() if left == right}
    env = env_text({key: str(value) for key, value in both.items() if key in group[0].ask.env})
    leads = [{**form.lead(row.ask), **mine} for row, mine in zip(group, own, strict=True)]
    several = len({row.judged.comparison.metric for row in group}) > 1
    group = [_labelled(row, mine, several=several) for row, mine in zip(group, own, strict=True)]
    rows = [{**lead, **_values(kind, row)} for lead, row in zip(leads, group, strict=True)]
    chains = list({row.chain.id: row.chain for row in group}.values())
    runs = session.of_chains(chains)
    models = {row.ask.model for row in group}
    conditions = [
        conditions_of(session.store, [run["run_id"] for run in runs if arm and run["arm"] == arm.name])
        for arm in (session.baseline, candidate)
    ]
    return Table(
        "verdicts",
        f"{title}: {session.what}",
        (*leading(leads, dict.fromkeys(key for lead in leads for key in lead)), *_columns(kind, rows)),
        tuple(rows),
        session.origin(session.baseline, models, [row.ask.cell for row in group]),
        {key: value for key, value in both.items() if key not in group[0].ask.env} | ({"env": env} if env else {}),
        conditions[0],
        _flags(session, runs, several=len(chains) > 1),
        kind="session",
        differ={key: values for key, values in settings.items() if key not in both},
        candidate=session.origin(candidate, models, [row.candidate_ask.cell for row in group]) if candidate else None,
        candidate_conditions=conditions[1],
        protocol=_protocol(session.plan, chains, group, runs),
        discards=tuple(_discards(group)),
        because=tuple(_because(group, kind)),
    )


def _of_both(form: Form, row: _Comparison) -> dict[str, tuple[Value, Value]]:
    """Return a row's settings without a leading column (variables by name), with both arms' values."""
    sides = [{**others_of(form, replace(ask, env={})), **ask.env} for ask in (row.ask, row.candidate_ask)]
    return {key: (sides[0].get(key), sides[1].get(key)) for key in dict.fromkeys((*sides[0], *sides[1]))}


def _own(both: Mapping[str, tuple[Value, Value]], varying: Sequence[str]) -> dict[str, Value]:
    """Return a row's own values of the settings that differ between rows."""
    sides = {key: both.get(key, (None, None)) for key in varying}
    return {key: left if left == right else of_arms(key, left, right) for key, (left, right) in sides.items()}


def _labelled(row: _Comparison, own: Mapping[str, Value], *, several: bool) -> _Comparison:
    metric = units.metric(row.judged.comparison.metric).label if several else ""
    words = (asking.label(row.ask.cell), *(f"{k}={v}" for k, v in own.items() if v is not None), metric)
    return replace(row, label=" ".join(filter(None, words)))


def _values(kind: str, row: _Comparison) -> dict[str, Value]:
    """Return a verdict's columns, with the numbers behind text columns."""
    judged, verdict, metric = row.judged, row.verdict, units.metric(row.judged.comparison.metric)
    if kind == "noise":  # the floor measured here; else the floor that decided on promotion
        floor = noise_floor(verdict) or None
    else:
        floor = judged.noise.sigma if verdict.noise is None and judged.noise else verdict.noise
    decided = verdict.verdict in ("faster", "slower")
    return {
        "chain": row.chain.id,
        "metric": metric.name,
        "label": metric.label,
        "baseline": row.baseline,
        "candidate": row.candidate,
        "effect": None if verdict.effect is None else percent(verdict.effect, "+"),
        "interval": verdict.ci and _range(verdict.ci),
        "same": _range(verdict.same_ci) if verdict.same_ci and not decided else None,
        "confidence": f"{100 * verdict.confidence:.2f} %" if verdict.ci else None,
        "mde": None if verdict.mde is None else percent(verdict.mde),
        "cycles": f"{verdict.valid_cycles} of {verdict.cycles}",
        "noise_floor": None if floor is None else percent(floor),
        "verdict": PREFIX[kind] + verdict.verdict,
        "promoted": judged.promoted,
        "valid_cycles": verdict.valid_cycles,
        "run_cycles": verdict.cycles,
        "k_to_settle": verdict.k_to_settle,
        "p": verdict.p,
        **_in_percent(verdict),
        "mde_pct": None if verdict.mde is None else 100 * verdict.mde,
        "noise_floor_pct": None if floor is None else 100 * floor,
    }


def _columns(kind: str, rows: Sequence[Mapping[str, Value]]) -> list[Column]:
    """Return the columns of verdicts, the verdict first; a screen has no intervals."""
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
        Column("same", "interval of same (%)", numeric=True) if any(row["same"] for row in rows) else None,
        Column("mde", "MDE (%)", numeric=True) if kind != "screen" else None,
        Column("cycles", "cycles", numeric=True),
        Column("noise_floor", "noise floor (%)", numeric=True),
    ]
    return [column for column in every if column]


def _protocol(
    plan: Plan, chains: Sequence[ChainStep], group: Sequence[_Comparison], runs: Sequence[Row]
) -> dict[str, Value]:
    """Return how the chains were measured, which is the same for all."""
    first = chains[0]
    limit = min(first.drift_limit, SCREEN_DRIFT_LIMIT) if first.screen else first.drift_limit
    decided = first.screen or plan.protocol < STEPS
    floors = sorted({row.judged.noise.session for row in group if row.judged.noise and decided})
    words: dict[str, Value] = {
        "protocol": plan.protocol,
        "cycles planned": first.cycles or f"for an effect of {100 * first.effect:g} %",
        "arms": AT_TEMPERATURE[bool(first.block_s)],
        "thermal": first.thermal,
        "drift limit": f"{100 * limit:g} %",
    }
    if pinned := dict.fromkeys(run["pinned"].strip("[]") for run in runs if run["pinned"]):
        words["pinned"] = "to processors " + " or ".join(pinned)
    return {**words, "noise floors of": ", ".join(floors)} if floors else words


def _flags(session: ChainSession, runs: Sequence[Row], *, several: bool) -> tuple[Flag, ...]:
    """Return the flags of runs, grouped by kind."""
    named = {run["run_id"]: f"{run['chain']} " * several + f"{run['role']} {run['cycle']}" for run in runs}
    flags = by_run(session.store, FLAGS, named).values()
    results = []
    for of_kind, reason in by_kind(flag for of_run in flags for flag in of_run):
        labels = tuple(dict.fromkeys(named[flag["run_id"]] for flag in of_kind))
        results.append(Flag(() if len(labels) == len(named) else labels, bool(of_kind[0]["hard"]), reason))
    return tuple(sorted(results, key=lambda flag: not flag.hard))


def _discards(group: Sequence[_Comparison]) -> list[Discard]:
    """Return the cycles that do not count, with equal rows grouped."""
    groups: dict[tuple[str, int, str], list[str]] = {}
    sizes = Counter(row.chain.id for row in group)
    for row in group:
        for cycle, reason in row.verdict.flaws.items():
            groups.setdefault((row.chain.id, cycle, reason), []).append(row.label)
    return [
        Discard(chain, cycle, () if len(labels) == sizes[chain] else tuple(labels), reason)
        for (chain, cycle, reason), labels in sorted(groups.items())
    ]


def _because(group: Sequence[_Comparison], kind: str) -> list[Because]:
    """Return the reasons of verdicts, with rows of equal reasons grouped."""
    groups: dict[tuple[str, tuple[str, ...]], list[_Comparison]] = {}
    for row in group:
        reasons = judgement.reasons(row.verdict)
        if row.verdict.ci:
            # drop the confidence, which is in the table: it would split rows of equal reasons
            reasons = (_deciding(row.verdict), *reasons[1:])
        groups.setdefault((row.verdict.verdict, reasons), []).append(row)
    because = []
    for (verdict, reasons), rows in groups.items():
        labels = () if len(rows) == len(group) else tuple(row.label for row in rows)
        mdes = sorted(row.verdict.mde for row in rows if row.verdict.mde is not None)
        seen = (f"MDE {_ends(mdes)} %",) if verdict == "inconclusive" and mdes else ()
        because.append(Because(PREFIX[kind] + verdict, labels, (*reasons, *seen)))
    return because


def _deciding(verdict: Verdict) -> str:
    """Return the first reason of a verdict, which decided it, without the confidence of the intervals."""
    same = "the interval of same" if verdict.same_ci else "the 90 % interval"  # that of the older protocols is fixed
    if verdict.verdict == "same":
        return f"{same} lies inside +-1 %"
    if verdict.verdict == "inconclusive":
        return f"the interval contains 0 and {same} is not inside +-1 %"
    return f"the interval lies {'above' if (verdict.effect or 0.0) > 0 else 'below'} 0"
