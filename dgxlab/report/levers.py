"""The ledger of what was tried: every experiment that was made to show something, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dgxlab import judgement
from dgxlab.errors import UsageError
from dgxlab.report.lineage import origin
from dgxlab.report.numbers import Value
from dgxlab.report.query import Query
from dgxlab.report.records import ArmsTable, Column, Origin, Provenance
from dgxlab.report.session import older
from dgxlab.stats import VERDICTS
from dgxlab.store import REJECTED

if TYPE_CHECKING:
    from dgxlab.store import Store

COLUMNS = (
    Column("lever", "lever"),
    Column("hypothesis", "hypothesis"),
    Column("status", "status"),
    Column("verdict", "newest verdict"),
    Column("why", "why"),
    Column("session", "session"),
)

OF_VERDICT = {
    "faster": "faster, not promoted",
    "mixed": "faster and slower",
    "slower": "dead end",
    "same": "dead end",
    "inconclusive": "undecided",
    "invalid": "undecided",
}
"""What an A/B session's word makes of a lever; one that has every claim that it needs to be promoted is `promoted`."""

TRIED = """SELECT e.digest, e.name, e.hypothesis, min(j.intent_at) AS first, max(j.intent_at) AS last
           FROM experiments AS e LEFT JOIN jobs AS j ON j.experiment = e.digest
           WHERE e.hypothesis <> '' GROUP BY e.digest ORDER BY first IS NULL, first, e.name, e.digest"""

OF_TWO = """SELECT DISTINCT v.job_id, jobs.kind, jobs.protocol FROM verdicts AS v JOIN jobs USING (job_id)
            WHERE candidate_arm = :candidate AND baseline_arm <> candidate_arm
              AND (:baseline = '' OR baseline_arm = :baseline)
            ORDER BY intent_at DESC, v.job_id DESC LIMIT 1"""


@dataclass(frozen=True)
class Found:
    """What the newest session of two arms says of its candidate.

    Attributes:
        session: Its job.
        kind: ab or screen.
        word: For the whole session; a screen says so.
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
        """The word, marked where it is older than its neighbours in a table may be."""
        return self.word + older(self.protocol)


def newest(store: Store, candidate: str, baseline: str = "") -> Found | None:
    """Return what the newest session says of a candidate, against that baseline or any; None where none was held."""
    found = store.rows(OF_TWO, {"candidate": candidate, "baseline": baseline})
    if not found:
        return None
    session, kind = found[0]["job_id"], found[0]["kind"]
    rows = store.verdicts(session)
    word = judgement.whole([row["verdict"] for row in rows])
    promoted = word == "faster" and any(row["promoted"] for row in rows)
    screen = "screen: " if kind == "screen" else ""
    told = [row for row in rows if row["effect"] is not None]
    gains = {(row["candidate_cell"], row["metric"]): 1 + _gain(row) / 100 for row in told}
    return Found(session, kind, screen + word, found[0]["protocol"], promoted, "; ".join(_because(rows)), gains)


def levers(store: Store, wanted: Query) -> ArmsTable:
    """Return a row for each experiment with a hypothesis, the first that was tried first.

    Raises:
        UsageError: if there is none, or none of a name that is asked for.
    """
    known = {row["name"]: row for row in sorted(store.rows(TRIED), key=lambda row: row["last"] or 0.0)}
    order = list(dict.fromkeys(row["name"] for row in store.rows(TRIED)))
    absent = [name for name in wanted.experiment if name not in known]
    if absent:
        raise UsageError(f"{store.path} has no experiment {absent[0]!r} with a hypothesis", next="dgxlab report")
    names = wanted.experiment or order
    if not names:
        raise UsageError(f"{store.path} has no experiment with a hypothesis", next="dgxlab report")
    rows, origins = [], []
    for name in names:
        row, origin = _lever(store, known[name])
        rows.append(row)
        origins += [Origin(name, origin)] if origin else []
    nowhere = Provenance(names[0], (), "", (), "", None, "")
    first = origins[0].provenance if origins else nowhere
    return ArmsTable("levers", "Levers", COLUMNS, tuple(rows), first, origins=tuple(origins))


def _lever(store: Store, experiment: Mapping[str, Any]) -> tuple[dict[str, Value], Provenance | None]:
    name = experiment["name"]
    row: dict[str, Value] = {"lever": name, "hypothesis": experiment["hypothesis"]}
    judged = newest(store, name)
    latest = _latest(store, name)
    if judged is not None and (latest is None or latest["state"] not in ("failed", "lost")):
        about = {"verdict": judged.shown, "why": judged.why, "session": judged.session}
        return {**row, **about, "status": _status(judged, latest)}, origin(store, store.job(judged.session), name)
    if latest is None:
        return {**row, "status": "not measured"}, None
    row |= {"session": latest["job_id"], "verdict": judged.shown if judged else None}
    status, why = _without(latest)
    return {**row, "status": status, "why": why}, origin(store, store.job(latest["job_id"]), name)


def _status(judged: Found, latest: Mapping[str, Any] | None) -> str:
    if latest is not None and latest["state"] in ("intended", "running"):
        return "being measured"
    if judged.promoted:
        return "promoted"
    word = judged.word.removeprefix("screen: ")
    if judged.kind == "screen":  # one bracket drops an idea and keeps none
        return "dead end" if word in ("slower", "same") else "screened"
    return OF_VERDICT[word]


def _without(latest: Mapping[str, Any]) -> tuple[str, str]:
    """Return status and reason of a lever by its newest session, which has no verdict."""
    if latest["state"] in ("intended", "running"):
        return "being measured", ""
    if latest["state"] == "done":
        return "measured", "no A/B session judged it"
    return "failed" if latest["state"] == "failed" else str(latest["state"]), str(latest["error"])


def _latest(store: Store, name: str) -> Mapping[str, Any] | None:
    """Return the newest session that was about an experiment: alone, or as the candidate."""
    found = store.rows(
        f"""SELECT job_id, state, error FROM jobs JOIN experiments ON digest = experiment
           WHERE experiments.name = ? AND kind <> 'noise'
           ORDER BY job_id IN ({REJECTED}), intent_at DESC, job_id DESC LIMIT 1""",  # noqa: S608 - our own
        (name,),
    )
    return found[0] if found else None


def _because(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Say how many claims came out how, by how much, and why the first of them did."""
    for word in VERDICTS:
        of_word = [row for row in rows if row["verdict"] == word]
        if not of_word:
            continue
        gains = sorted(_gain(row) for row in of_word if row["effect"] is not None)
        ends = dict.fromkeys(f"{gain:+.2f}" for gain in gains[:1] + gains[-1:])
        around = f" ({' to '.join(ends)} % in speed)" if ends else ""
        flaws = {
            f"cycle {cycle} does not count: {flaw}" for r in of_word for cycle, flaw in json.loads(r["flaws"]).items()
        }
        reasons = dict.fromkeys(r for row in of_word for r in json.loads(row["reasons"]) if r not in flaws)
        said = [reason for reason in reasons if reason.startswith("not promoted")]
        first = next(iter(reasons), "")
        why = ", ".join(dict.fromkeys(filter(None, (first if word == "invalid" else "", *said[:1]))))
        yield f"{len(of_word)} of {len(rows)} {word}{around}" + (f": {why}" if why else "")


def _gain(row: Mapping[str, Any]) -> float:
    """Return by how many percent a comparison's candidate is faster, also where it is about a time."""
    effect = float(row["effect"])
    return 100 * (effect if row["better"] == "higher" else 1 / (1 + effect) - 1)
