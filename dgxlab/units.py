"""The registry of metrics, and how numbers are shown: one unit and one number of decimals for a column.

A metric's name is llama.cpp's own column name. Values are kept in the metric's unit; a column shows them in the largest
of its `scales` in which the column's largest value is at least 1, so that it reads without exponents.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

MISSING = "\N{EN DASH}"  # shown in a table for a missing value

_RESOLUTION = 0.005
"""A column's last digit is worth at most this share of its smallest value: half the smallest effect worth showing."""

_MAX_DIGITS = 5  # digits of a column's largest value beyond which decimals are dropped


@dataclass(frozen=True)
class Metric:
    """A metric; `better` is "higher" or "lower"."""

    name: str  # llama.cpp's column name
    unit: str  # unit of stored values
    better: str
    label: str = ""  # its name in tables, without the unit
    scaled: Mapping[str, float] = field(default_factory=dict)  # its `scales`; {} if tables show the stored unit

    @property
    def scales(self) -> Mapping[str, float]:
        """The units that tables may show, smallest first: how many of the stored unit make one of each."""
        return self.scaled or {self.unit: 1.0}


METRICS = {
    metric.name: metric
    for metric in (
        Metric("avg_ts", "t/s", "higher"),
        Metric("speed_pp", "t/s", "higher", "S_PP"),
        Metric("speed_tg", "t/s", "higher", "S_TG"),
        Metric("speed", "t/s", "higher", "S"),
        Metric("time_us", "us", "lower", "time"),
        # of a server's streams: tokens over the whole time, from a request to its first token, between tokens
        Metric("speed_out", "t/s", "higher", "aggregate"),
        Metric("ttft_p50_ms", "ms", "lower", "TTFT p50"),
        Metric("ttft_p95_ms", "ms", "lower", "TTFT p95"),
        Metric("itl_p50_ms", "ms", "lower", "ITL p50"),
        Metric("itl_p99_ms", "ms", "lower", "ITL p99"),
        # of kernels under a tracer: their sum in a step, when any ran, the clock, one launch; launches, and in graphs
        Metric("step_us", "us", "lower", "step"),
        Metric("busy_us", "us", "lower", "busy"),
        Metric("wall_us", "us", "lower", "wall"),
        Metric("launch_us", "us", "lower", "launch"),
        Metric("launches", "launches", "lower"),
        Metric("graph_nodes", "launches", "higher", "in graphs"),
        Metric("flops", "FLOPS", "higher", "", {"MFLOPS": 1e6, "GFLOPS": 1e9, "TFLOPS": 1e12}),
        # llama.cpp divides by 2^30 and prints GB/s: stored as what it is, shown in the unit of every other rate
        Metric("bandwidth_gb_s", "GiB/s", "higher", "", {"GB/s": 1e9 / 2**30}),
    )
}
"""Every metric that is stored, by name."""

COMPUTED = {
    metric.name: metric
    for metric in (Metric("rate", "GB/s", "higher"), Metric("host_gap_ms", "ms", "lower", "host gap a step"))
}
"""Metrics that reports compute and the record does not hold; GB are 10^9 bytes."""


def metric(name: str) -> Metric:
    """Return the metric of that name; raises ValueError if there is none."""
    known = METRICS.get(name) or COMPUTED.get(name)
    if not known:
        raise ValueError(f"{name!r} is no metric; there are {', '.join(METRICS)}")
    return known


@dataclass(frozen=True)
class Style:
    """How one column shows its values."""

    unit: str
    factor: float  # factor from the shown unit to the stored one
    decimals: int

    def value(self, value: float | None) -> str:
        """Format a value that is given in the stored unit; a missing one is a dash, never 0."""
        return MISSING if value is None else f"{value / self.factor:.{self.decimals}f}"

    def spread(self, value: float) -> str:
        """Format a spread that is given in the stored unit; a spread above 0 never rounds to 0."""
        shown, decimals = value / self.factor, self.decimals
        if 0 < shown < 0.5 * 10**-decimals:
            decimals = min(12, -math.floor(math.log10(shown)))
        return "0" if shown == 0 else f"{shown:.{decimals}f}"


def style(metric: Metric, values: Iterable[float | None]) -> Style:
    """Choose the unit and the number of decimals of a table column from its values, in the stored unit.

    The smallest value gets three or four significant digits; fewer if the largest would then have more than five, but
    never fewer than two. Missing values do not count.
    """
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value) and value != 0]
    scales = list(metric.scales.items())
    if not sizes:
        return Style(*scales[-1], 0)
    unit, factor = next((scale for scale in reversed(scales) if max(sizes) >= scale[1]), scales[0])
    smallest, largest = min(sizes) / factor, max(sizes) / factor
    wanted = max(0, -math.floor(math.log10(_RESOLUTION * smallest)))
    room = max(0, _MAX_DIGITS - 1 - math.floor(math.log10(largest)))
    least = max(0, 1 - math.floor(math.log10(smallest)))
    return Style(unit, factor, max(least, min(wanted, room)))


# -- conditions -------------------------------------------------------------------------------------------------------

_CONDITIONS = {
    "clocks.sm": "SM {} MHz",
    "temperature.gpu": "{} °C",
    "power.draw": "{} W",
    "copy.bandwidth": "copies {} GB/s",
    "cpu_mhz": "CPU {} MHz",
    "cpu_temp_c": "CPU {} °C",
}


def ranges(seen: Iterable[tuple[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the lowest and the highest value of each quantity, which may be seen often, as on several GPUs."""
    ends: dict[str, tuple[float, float]] = {}
    for name, value in seen:
        low, high = ends.get(name, (value, value))
        ends[name] = (min(low, value), max(high, value))
    return ends


def conditions(ranges: Mapping[str, Sequence[float]]) -> str:
    """Format the state of the device in some runs, as `SM 1965 to 1980 MHz, 55 to 61 °C`.

    `ranges` has the values to show (lowest and highest, or a median) by nvidia-smi's field, or `cpu_mhz`, `cpu_temp_c`.
    The processor's are shown only where there are none of a GPU.
    """
    texts = {name: " to ".join(dict.fromkeys(f"{end:.0f}" for end in ends)) for name, ends in ranges.items()}
    of_gpu = [name for name in _CONDITIONS if name in ranges and "." in name]
    names = of_gpu or [name for name in _CONDITIONS if name in ranges]
    return ", ".join(_CONDITIONS[name].format(texts[name]) for name in names)


def share(text: str) -> float:
    """Read a share, `2%` or `0.02`; ValueError unless it is a number between 0 and 1."""
    number = text.strip().removesuffix("%")
    value = float(number) / (100 if number != text.strip() else 1)
    if not 0 < value < 1:
        raise ValueError(f"{text} is not between 0 and 1")
    return value


def percent(share: float) -> str:
    """Format a share: 0.013 is `1.3 %`, 3.456 is `346 %`."""
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def change(share: float) -> str:
    """Format a change in percent with its sign: `+59.19`, `-0.40`, but never `+0.00`."""
    shown = f"{100 * share:+.2f}"
    return "0.00" if shown in ("+0.00", "-0.00") else shown


def interval(bounds: Iterable[float]) -> str:
    """Format an interval of changes in percent: `+1.20 to +2.31`."""
    return " to ".join(map(change, bounds))


# -- durations and sizes ----------------------------------------------------------------------------------------------


def busy(wait_s: float) -> str:
    """Return what is said of a host or device that was waited for, for `wait_s` seconds."""
    return f"stayed busy for {duration(wait_s)}" if wait_s else "is busy"


EARLIER = "a job that asked earlier"  # for whom a free lock is kept


def held(what: str, who: str) -> str:
    """Return the words for a lock, folder or device `what` that cannot be had because of `who`."""
    return f"{what} is {'kept for' if who == EARLIER else 'held by'} {who}"


def duration(seconds: float | None) -> str:
    """Format seconds with the one or two units that matter: `850 ms`, `12.3 s`, `4 min 30 s`, `2 h 05 min`."""
    if seconds is None:
        return MISSING
    if 0 < seconds < 0.0009995:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(count: int | None) -> str:
    """Format bytes: `512 B`, `1.40 MiB`, `3.74 GiB`."""
    if count is None:
        return MISSING
    if count < 1024:
        return f"{count} B"
    units = ("KiB", "MiB", "GiB", "TiB")
    step = next((i for i in range(1, len(units)) if count / 1024**i < 999.5), len(units))
    value = count / 1024**step
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {units[step - 1]}"
