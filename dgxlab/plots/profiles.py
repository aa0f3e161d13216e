"""The picture of profiles: a bar for each prompt or step, divided by groups of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dgxlab.plots import COLOURS, label, new
from dgxlab.report import Number, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BAR = 0.55  # height of a bar and its distance to the next, in inches
HATCHES = ("", "//", "..")  # patterns that distinguish groups of the same colour


def bars(tables: Sequence[Table]) -> Figure:
    """Draw a bar for each table of groups (`report.profile.by_group`), divided by their shares, the first on top."""
    groups = dict.fromkeys(str(row["group"]) for table in tables for row in table.rows)
    looks = dict(zip(groups, itertools.cycle((colour, hatch) for hatch in HATCHES for colour in COLOURS), strict=False))
    with new(1.0 + BAR * len(tables)) as figure:
        axes = figure.add_subplot()
        for number, table in enumerate(tables):
            left = 0.0
            for row in table.rows:
                share, (colour, hatch) = row["share_pct"], looks[group := str(row["group"])]
                assert isinstance(share, float)
                axes.barh(number, share, 0.6, left, color=colour, hatch=hatch, edgecolor="white", label=group)
                left += share
        axes.set_yticks(range(len(tables)), [_name(table) for table in tables])
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        axes.set_xlim(0, 100)
        axes.set_xlabel("share of kernel time (%)")
        label(figure, "Where the time of a step goes", _settings(tables), [table.provenance for table in tables])
    return figure


def _name(table: Table) -> str:
    times = [row["step_us"] for row in table.rows]
    return f"{table.title}\n{sum(each.middle for each in times if isinstance(each, Number)):.1f} us of kernels"


def _settings(tables: Sequence[Table]) -> list[str]:
    return [f"{name} {value}" for name, value in tables[0].settings.items() if name != "model"]
