"""The published record: figures that documents state, each with its source, host, pin and unit.

They are not ours: nobody here measured them, most have neither n nor spread, and some cannot be true. `load` adds the
two files of this package to results.db, in tables of their own; `figures` and `gates` ask for them, `implausible` says
why a figure is more than its GPU can do. Only `report` sets them beside what was measured, and says which is which.
"""

from dgxlab.published.figure import Figure, GateResult
from dgxlab.published.guard import implausible, peaks_of
from dgxlab.published.read import read_figures, read_gates
from dgxlab.published.record import figures, gates, load

__all__ = ["Figure", "GateResult", "figures", "gates", "implausible", "load", "peaks_of", "read_figures", "read_gates"]
