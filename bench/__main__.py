"""`python -m bench`: JSON on stdout, a table on stderr."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict

from bench.commands import completion, edit, help_page, plan10k, try_again, try_overhead, up_to_date, verdicts
from bench.figure import Figure, Others, described
from bench.fleets import cluster_start, cluster_up_to_date, fleet_coverage, fleet_report, many_jobs
from bench.jobs import agent, followed, memory, over_distance, over_ssh, stage
from bench.loops import loop_false, loop_fdr, loop_power, loop_power_quiet, loop_screens
from bench.noises import alternating, families, half_widths, noises, promotions
from bench.records import adopt, ingest, listed, living, page, report, size
from bench.serving import client, streams
from bench.simulated import blocks, coverage, false_verdicts, power, power_restless, screens, wrong_sign

FIGURES: Mapping[str, Callable[[bool], Figure]] = {
    "help": help_page,
    "completion": completion,
    "plan10k": plan10k,
    "up_to_date": up_to_date,
    "edit": edit,
    "try_again": try_again,
    "try_overhead": try_overhead,
    "agent": agent,
    "ingest": ingest,
    "import": adopt,
    "size": size,
    "report": report,
    "page": page,
    "sessions": listed,
    "living": living,
    "ssh": over_ssh,
    "distance": over_distance,
    "stage": stage,
    "memory": memory,
    "followed": followed,
    "client": client,
    "streams": streams,
    "verdicts": verdicts,
    "false_verdicts": false_verdicts,
    "wrong_sign": wrong_sign,
    "power": power,
    "power_restless": power_restless,
    "coverage": coverage,
    "blocks": blocks,
    "noises": noises,
    "alternating": alternating,
    "families": families,
    "promotions": promotions,
    "half_widths": half_widths,
    "screens": screens,
    "fleet_coverage": fleet_coverage,
    "fleet_report": fleet_report,
    "many_jobs": many_jobs,
    "cluster_up_to_date": cluster_up_to_date,
    "cluster_start": cluster_start,
    **{each.__name__: each for each in (loop_false, loop_fdr, loop_power, loop_power_quiet, loop_screens)},
}


def main() -> int:
    """Measure the requested figures and print them."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure how fast dgxlab itself is.")
    parser.add_argument("--only", choices=FIGURES, nargs="+", metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("--quick", action="store_true", help="tiny counts: that it works, not how fast it is")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # else temporary folders stay
    rows, lines = [], []
    for name, take in FIGURES.items():
        if args.only is None or name in args.only:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            others = Others()
            taken = take(args.quick)
            busy = others.cpus()
            rows.append({**asdict(taken), "reached": taken.reached, "others_cpus": round(busy, 2)})
            lines.append(line(taken, busy))
    print("\n".join(["", *lines]), file=sys.stderr)
    print(json.dumps({"figures": rows, "quick": args.quick, "machine": described()}, indent=2))
    return 0


def line(figure: Figure, others: float) -> str:
    """Return a figure as a row of the table; `others` is the mean number of processors that other programs used."""
    spread = "" if figure.spread is None else f" ± {figure.spread:.2f}"
    value = f"{figure.value:.2f}{spread} {figure.unit}"
    verdict = "reached" if figure.reached else "MISSED"
    parts = [f"{part} {seconds:.3f} s" for part, seconds in figure.parts.items()]
    counts = [f"{count} {name}" for name, count in figure.counts.items()]
    of = "; ".join([f"n={figure.n}", *parts, *counts, f"others had {others:.1f} cpus"])
    bounds = [
        f"{sign} {to:.4g} {figure.unit}" for sign, to in ((">=", figure.least), ("<=", figure.reach)) if to is not None
    ]
    row = f"{figure.name:<15}  {value:>16}  {' '.join(bounds):>8}  {verdict:<7}  {figure.what} ({of})"
    return "\n".join([row, *rates(figure.table)])


def rates(table: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yield the lines of a figure's own table, the header first."""
    for columns in list(table.values())[:1]:
        yield f"  {'%':<24}" + "".join(f"{column:>7}" for column in columns)
    for rule, row in table.items():
        yield f"  {rule:<24}" + "".join(f"{value:7.2f}" for value in row.values())


if __name__ == "__main__":
    sys.exit(main())
