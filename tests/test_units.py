"""The registry, and how a column of numbers looks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgxlab import units
from dgxlab.tools import profile_files
from dgxlab.units import METRICS, style


def shown(name: str, values: list[float | None]) -> tuple[str, list[str]]:
    column = style(units.metric(name), values)
    return column.unit, [column.value(value) for value in values]


def test_registry_is_llama_cpps_own_columns_the_tracers_and_those_of_servers() -> None:
    of_kernels, latencies = profile_files.UNITS, {"ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms"}
    rates = METRICS.keys() - of_kernels - latencies - {"speed_out"}
    assert rates == {"avg_ts", "speed_pp", "speed_tg", "speed", "time_us", "flops", "bandwidth_gb_s"}
    assert {name: METRICS[name].unit for name in of_kernels} == of_kernels
    lower = {name for name, metric in METRICS.items() if metric.better == "lower"}
    assert lower == {"time_us", *of_kernels, *latencies} - {profile_files.NODES}
    assert all(metric.scales for metric in METRICS.values())
    with pytest.raises(ValueError, match="'tps' is no metric"):
        units.metric("tps")


@pytest.mark.parametrize(
    ("name", "values", "unit", "cells"),
    [
        ("flops", [817e9, 5.77e12, 49.5e12], "TFLOPS", ["0.817", "5.770", "49.500"]),
        ("flops", [3.2e9, 61.25e9], "GFLOPS", ["3.20", "61.25"]),
        ("flops", [250e6], "MFLOPS", ["250"]),
        ("avg_ts", [718.15, 750.4], "t/s", ["718", "750"]),
        ("avg_ts", [54.83, 62.2], "t/s", ["54.8", "62.2"]),
        ("avg_ts", [36503.9, 1796.1], "t/s", ["36504", "1796"]),
        ("avg_ts", [1.2345, 36503.9], "t/s", ["1.2", "36503.9"]),
        ("speed_tg", [60.1, None, 2064.0], "t/s", ["60.1", units.MISSING, "2064.0"]),
        ("time_us", [143.7, 1214.0], "us", ["143.7", "1214.0"]),
        ("bandwidth_gb_s", [273.0], "GB/s", ["293"]),
        ("rate", [0.0531], "GB/s", ["0.0531"]),
        ("rate", [0.1503, 12.2304], "GB/s", ["0.150", "12.230"]),
        ("avg_ts", [None], "t/s", [units.MISSING]),
    ],
)
def test_a_column_shares_one_unit_and_its_decimals(
    name: str, values: list[float | None], unit: str, cells: list[str]
) -> None:
    assert shown(name, values) == (unit, cells)


@given(st.lists(st.floats(min_value=1e-3, max_value=1e14), min_size=1, max_size=20))
def test_no_value_is_shown_as_zero_or_loses_a_percent_step(values: list[float]) -> None:
    for name in ("flops", "avg_ts"):
        column = style(units.metric(name), values)
        for value in values:
            assert float(column.value(value)) * column.factor == pytest.approx(value, rel=0.051)


def test_spread_is_never_rounded_to_zero() -> None:
    column = style(units.metric("avg_ts"), [32.9, 54.8])
    assert column.spread(0.047) == "0.05"
    assert column.spread(1.23) == "1.2"
    assert column.spread(0.0) == "0"


def test_durations() -> None:
    cases = {
        0.0: "0 ms",
        0.0004: "400 us",
        0.85: "850 ms",
        0.9999: "1.0 s",
        12.34: "12.3 s",
        59.96: "1 min 00 s",
        270.2: "4 min 30 s",
        3599.7: "1 h 00 min",
        7500.0: "2 h 05 min",
    }
    assert {seconds: units.duration(seconds) for seconds in cases} == cases
    assert units.duration(None) == units.MISSING


def test_sizes() -> None:
    cases = {
        0: "0 B",
        1023: "1023 B",
        1024: "1.00 KiB",
        1474656: "1.41 MiB",
        34 << 20: "34.0 MiB",
        4014232448: "3.74 GiB",
    }
    cases[1023 << 10] = "1.00 MiB"
    cases[5000 << 40] = "5000 TiB"
    assert {count: units.size(count) for count in cases} == cases
    assert units.size(None) == units.MISSING


def test_conditions() -> None:
    host = {"cpu_mhz": (2596.1, 2596.4), "cpu_temp_c": (61.0, 64.0), "load_1min": (0.1, 0.2)}
    assert units.conditions(host) == "CPU 2596 MHz, CPU 61 to 64 °C"
    gpu = {"temperature.gpu": (43.0, 71.0), "clocks.sm": (1965.0, 1980.0), "clocks.mem": (3201.0, 3201.0)}
    assert units.conditions({**host, **gpu}) == "SM 1965 to 1980 MHz, 43 to 71 °C"
    assert (units.conditions({}), units.conditions({"load_1min": (0.1, 0.2)})) == ("", "")


@pytest.mark.parametrize(("share", "text"), [(0.013, "1.3 %"), (0.002, "0.2 %"), (0.996, "100 %"), (3.456, "346 %")])
def test_a_share_as_percent(share: float, text: str) -> None:
    assert units.percent(share) == text
