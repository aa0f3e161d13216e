"""`python -m faults`: a table on stdout, progress and failures on stderr; exits with 1 where anything did not hold."""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from typing import Any

from faults.campaign import Tally, campaign, trials
from faults.fault import Fault
from faults.kinds import FAULTS

SHOWN = 5
"""Of all that a kind's faults met, what they met most often stands in the table."""


def main() -> int:
    """Run the campaign that is asked for and print its table."""
    args = _arguments()
    chosen = [FAULTS[name] for name in args.only or FAULTS]
    for fault in chosen:
        if fault.lacks():
            print(f"{fault.name} is left out: {fault.lacks()}", file=sys.stderr)
    chosen = [fault for fault in chosen if not fault.lacks()]
    if args.trial is not None:
        return _again(chosen[0], args.seed, args.trial)
    begin = time.monotonic()

    def times(fault: Fault[Any]) -> int:
        return max(1, round(fault.times * args.scale))

    print(f"seed {args.seed}", file=sys.stderr, flush=True)
    tallies = campaign(chosen, args.seed, times, args.workers, lambda fault, tally: _say(fault, tally, args.seed))
    print(table(chosen, tallies))
    print(f"\nseed {args.seed}, {(time.monotonic() - begin) / 60:.0f} min, {args.workers} at once")
    return int(any(tally.failures for tally in tallies.values()))


def table(faults: list[Fault[Any]], tallies: dict[str, Tally]) -> str:
    """Return the campaign as a markdown table."""
    rows = [
        "| fault | trials | failures | at most (95 %) | must hold | it met |",
        "| --- | ---: | ---: | ---: | --- | --- |",
    ]
    for fault in faults:
        tally = tallies[fault.name]
        bound = "-" if tally.failures else f"{100 * tally.bound:.3g} %"
        met = ", ".join(f"{word} {count:,}" for word, count in tally.met.most_common(SHOWN))
        met += f", and {others} more" if (others := len(tally.met) - SHOWN) > 0 else ""
        rows.append(f"| {fault.what} | {tally.trials:,} | {len(tally.failures)} | {bound} | {fault.holds} | {met} |")
    return "\n".join(rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m faults", description="Inject faults and check that nothing is lost."
    )
    parser.add_argument("--only", action="append", choices=FAULTS, help="this kind alone; may be given again")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6), help="decides every trial")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--trial", type=int, help="this one trial of the kind of --only, to see a failure again")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1), help="processes at once")
    args = parser.parse_args()
    if args.trial is not None and len(args.only or ()) != 1:
        parser.error("--trial needs one --only")
    return args


def _again(fault: Fault[Any], seed: int, number: int) -> int:
    tally = trials(fault, seed, [number])
    _say(fault, tally, seed)
    return int(bool(tally.failures))


def _say(fault: Fault[Any], tally: Tally, seed: int) -> None:
    met = ", ".join(f"{word} {count}" for word, count in tally.met.most_common())
    print(f"{fault.name}: {tally.trials} trials in {tally.seconds:.0f} s: {met}", file=sys.stderr, flush=True)
    for failure in tally.failures:
        again = f"python -m faults --only {fault.name} --seed {seed}"
        if failure.number is not None:
            again += f" --trial {failure.number}"
        print(f"FAILED {fault.name}: {failure.reason}\n  again: {again}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
