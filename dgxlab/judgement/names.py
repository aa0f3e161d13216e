"""Names of cells and of what is compared: in tables, in the ledger of a loop, in searches and in `watch` alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dgxlab.chains import Comparison
from dgxlab.judgement import recorded
from dgxlab.model import Cell, RunStep, digest
from dgxlab.store import Store
from dgxlab.tools import Launch, metric_label


@dataclass(frozen=True)
class CellAsk:
    """A cell on a model ("" for none), in an environment."""

    cell: Cell
    model: str
    env: Mapping[str, str]

    @cached_property
    def identity(self) -> tuple[str, str, str]:
        """Identity of the cell within an arm: Cell.key, model name, digest of the environment."""
        return self.cell.key, self.model, digest(self.env, 16)


def assigned(name: str, value: object) -> str:
    """Return a setting or environment variable in shell syntax: `A=1`, `B=""`."""
    return name + ('=""' if value == "" else f"={value}")


def keys_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all rows, each once."""
    return list(dict.fromkeys(key for row in rows for key in row))


def varying_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between the rows, given each row's settings."""
    return [key for key in keys_of(rows) if len({repr(row.get(key)) for row in rows}) > 1]


def told_apart(names: Sequence[str], asks: Sequence[CellAsk]) -> list[str]:
    """Return the names of cells, with what cells of one name differ in: model, else tool, settings, environment.

    A minus marks a setting or variable that others of the name have: without it, one would be called as all of them.
    """
    kinds: tuple[Callable[[CellAsk], Mapping[str, str]], ...] = (
        lambda ask: {"model": ask.model},
        lambda ask: {"tool": ask.cell.tool},
        lambda ask: {key: assigned(key, value) for key, value in {**ask.cell.params, **ask.cell.fixed}.items()},
        lambda ask: {key: assigned(key, value) for key, value in ask.env.items()},
    )
    for words_of in kinds:
        words = [words_of(ask) for ask in asks]
        alike: dict[str, list[Mapping[str, str]]] = {}
        for name, own in zip(names, words, strict=True):
            alike.setdefault(name, []).append(own)
        varying = {name: varying_of(others) for name, others in alike.items()}
        told = []
        for name, own in zip(names, words, strict=True):
            more = [own.get(key, f"-{key}") for key in varying[name]]
            # a model comes first, as in tables of several
            told.append(" ".join(filter(None, [*more, name] if words_of is kinds[0] else [name, *more])))
        names = told
    return list(names)


def of_comparisons(pairs: Iterable[tuple[Launch | RunStep, Comparison]]) -> list[str]:
    """Return the name of each comparison, given with the baseline's run: cell, metric if its tool has several."""
    names, asks = [], []
    for run, each in pairs:
        cell = next(cell for cell in run.cells if cell.key == each.baseline)
        names.append(" ".join(filter(None, (cell.label, metric_label(run.tool, each.metric)))))
        asks.append(CellAsk(cell, run.model, run.env))
    return told_apart(names, asks)


def of_verdicts(store: Store, job_id: str) -> list[str]:
    """Return the name of each verdict of a session, in their order."""
    runs = {chain.id: chain.baseline for chain in store.job(job_id).plan.chains}
    return of_comparisons((runs[each.chain], each.comparison) for each in recorded(store, job_id))
