"""What `host clean` prints: what lies on a host, what of it goes, and why the rest stays."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dgxlab.cli._out import plural, table
from dgxlab.errors import one_line
from dgxlab.units import size

if TYPE_CHECKING:
    from dgxlab.agent.inventory import Item
    from dgxlab.lab.clean import Candidate, Cleaned


def listing(candidates: Sequence[Candidate]) -> str:
    """Return a table of everything, and how much of it goes."""
    if not candidates:
        return "nothing lies there"
    goes = [candidate.item for candidate in candidates if not candidate.kept]
    stays = [candidate.item for candidate in candidates if candidate.kept]
    rows = [
        {
            "kind": candidate.item.kind,
            "name": candidate.item.name,
            "last used": time.strftime("%Y-%m-%d", time.localtime(time.time() - candidate.item.age_s)),
            "size": size(candidate.item.bytes),
            "what becomes of it": f"stays: {candidate.kept}" if candidate.kept else "goes",
        }
        for candidate in candidates
    ]
    return f"{table(rows, right=('size',))}\n{len(goes)} of {len(rows)} go, {_total(goes)}; {_total(stays)} stay"


def hint(candidates: Sequence[Candidate], host: str, kinds: Sequence[str], days: float) -> str:
    """Return what to say where nothing goes and things stay only because they were used lately, "" elsewhere."""
    if any(not candidate.kept for candidate in candidates) or not any(candidate.recent for candidate in candidates):
        return ""
    words = ["dgxlab", "host", "clean", host, *(word for kind in kinds for word in ("--kind", kind))]
    command = shlex.join([*words, "--older-than", "0", "--dry-run"])
    return f"nothing goes, for all that may go was used in the last {days:g} days; to see it: {command}"


def outcome(cleaned: Cleaned) -> str:
    """Return what is gone, and what stayed against the plan."""
    kept = [(candidate.item, candidate.kept) for candidate in cleaned.kept]
    stayed = [one_line(f"{item.kind} {item.name} stays: {reason}") for item, reason in kept]
    return "\n".join([*stayed, f"removed {plural(len(cleaned.removed), 'thing')}, {_total(cleaned.removed)}"])


def as_json(candidates: Iterable[Candidate]) -> list[dict[str, Any]]:
    """Return candidates flat, with whether each goes."""
    return [{**vars(candidate.item), "goes": not candidate.kept, "kept": candidate.kept} for candidate in candidates]


def _total(items: Iterable[Item]) -> str:
    return size(sum(item.bytes for item in items))
