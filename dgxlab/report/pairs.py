"""The sessions that compared the same two experiments, side by side: a newer one hides no effect of an older one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from dgxlab import judgement, units
from dgxlab.judgement import Judged
from dgxlab.model import ChainStep, FileModel, ModelStep, model_id
from dgxlab.report.ask import label, plan_of
from dgxlab.report.lineage import origin
from dgxlab.report.numbers import Value, percent
from dgxlab.report.records import ArmsTable, Column, Origin
from dgxlab.report.session import older
from dgxlab.report.tables import env_text
from dgxlab.stats import Verdict
from dgxlab.tools import BENCHES

if TYPE_CHECKING:
    from dgxlab.store import Job, Store

SESSIONS = """SELECT DISTINCT job_id, intent_at FROM verdicts JOIN jobs USING (job_id)
              WHERE (kind, baseline_arm, candidate_arm) IN (
                  SELECT kind, baseline_arm, candidate_arm FROM verdicts JOIN jobs USING (job_id) WHERE job_id = ?)
              ORDER BY intent_at, job_id"""

Key = tuple[str, ...]
"""What makes two comparisons the same: cells, metric, model and environments."""


def sessions_of_pair(store: Store, job: Job) -> list[Job]:
    """Return the sessions of the same kind, baseline and candidate that have verdicts, the first one first."""
    return [store.job(row["job_id"]) for row in store.rows(SESSIONS, (job.job_id,))]


def pair_table(store: Store, job: Job, sessions: Sequence[Job]) -> ArmsTable:
    """Return a row for each comparison of a session, with the effect that each session of its pair found.

    Raises:
        UsageError: if a session's plan cannot be read.
    """
    compared = [dict(_comparisons(store, each)) for each in sessions]
    own = sessions.index(job)
    names = {key: _name(chain, one) for key, (chain, one) in compared[own].items()}
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
    origins = tuple(Origin(text, origin(store, each, candidate)) for text, each in zip(labels, sessions, strict=True))
    return ArmsTable(
        "verdicts",
        f"Effects in the {len(sessions)} sessions of this pair",
        (Column("cell", "cell"), *columns),
        tuple(rows),
        origins[own].provenance,
        origins=origins,
        notes=("effect with the interval that decides, in % of the baseline; the lines above are of the candidate",),
    )


def _comparisons(store: Store, job: Job) -> Iterator[tuple[Key, tuple[ChainStep, Judged]]]:
    plan = plan_of(job)
    chains = {chain.id: chain for chain in plan.chains}
    steps = [step for step in plan.steps if isinstance(step, ModelStep)]
    models = {step.model: model_id(step.recipe or FileModel(step.path)) for step in steps}
    for one in judgement.recorded(store, job.job_id):
        chain, comparison = chains[one.chain], one.comparison
        around = (models.get(chain.baseline.model, ""), env_text(chain.baseline.env), env_text(chain.candidate.env))
        yield (comparison.baseline, comparison.candidate, comparison.metric, *around), (chain, one)


def _name(chain: ChainStep, one: Judged) -> str:
    cell = next(cell for cell in chain.baseline.cells if cell.key == one.comparison.baseline)
    metric = units.metric(one.comparison.metric).label if len(BENCHES[cell.tool].compared) > 1 else ""
    return " ".join(filter(None, (chain.baseline.model, label(cell), metric)))


def _effect(number: int, found: Verdict) -> Mapping[str, Value]:
    """Return what one session found, in words and as numbers."""
    low, high = found.ci or (None, None)
    same_low, same_high = found.same_ci or (None, None)
    words = ["" if found.effect is None else percent(found.effect, "+")]
    words += [f"({' to '.join(percent(bound, '+') for bound in found.interval)})"] if found.interval else []
    shares = {"effect_pct": found.effect, "ci_low_pct": low, "ci_high_pct": high}
    shares |= {"same_low_pct": same_low, "same_high_pct": same_high}
    return {
        f"effect.{number}": " ".join(filter(None, (*words, found.verdict))),
        **{f"{name}.{number}": None if share is None else 100 * share for name, share in shares.items()},
    }
