"""PNG pictures for plan documents: the only place that draws, with matplotlib.

`draw` takes a report: concurrency curves, and the throughput of operations against n. `chain` takes a session of two
arms: the value of every run over time, with temperature and clock under it. The same record gives the same bytes.
matplotlib is an extra, `dgxlab[plots]`, and imported inside the functions that draw.
"""

from dgxlab.plots.chains import chain
from dgxlab.plots.curves import draw

__all__ = ["chain", "draw"]
