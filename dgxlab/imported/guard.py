"""Which values of a file cannot be true on the GPU that it names: they are kept, and said."""

from __future__ import annotations

from collections.abc import Iterator

from dgxlab.imported.reading import Reading, Row
from dgxlab.roofline import implausible, together, weights_of
from dgxlab.units import METRICS

NAMES = ("device_description", "gpu_info", "gpu")
"""What files call the GPU; llama-bench lists several with commas."""

NAMED = 10
"""Values that are named one by one; of more only the number is said."""


def impossible(reading: Reading) -> Iterator[str]:
    """Yield a sentence for each value that exceeds the GPU's peaks; none where the file names no known GPU."""
    provenance = reading.provenance
    named = next((str(said) for name in NAMES if (said := provenance.get(name))), "")
    gpu = together(named.split(", "))
    if gpu is None:
        return
    model = " ".join(str(provenance.get(name, "")) for name in ("model_filename", "model_type"))
    weights = weights_of(model, str(provenance.get("model_type", ""))) if model.strip() else None
    count = 0
    for row in reading.rows:
        for each in (each for each in row.values if each.metric in METRICS):
            found = (
                implausible(each.metric, row.params, v, gpu, weights=weights, moved=_moved(row)) for v in each.values
            )
            for why in filter(None, found):
                count += 1
                if count <= NAMED:
                    yield f"{row.label} cannot be true: {why}"
    if count > NAMED:
        yield f"{count - NAMED} more values cannot be true either"


def _moved(row: Row) -> float | None:
    """Return the bytes of one call: where the row says them, or from its bandwidth and time, as of a harness."""
    first = {each.metric: each.values[0] for each in row.values}
    if "memory_kb" in first:
        return first["memory_kb"] * 1024
    if "bandwidth_gb_s" in first and "time_us" in first:
        return first["bandwidth_gb_s"] * 2**30 * first["time_us"] / 1e6
    return None
