"""`python -m faults`: a table on stdout, progress and failures on stderr; exits with 1 if a trial failed."""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from typing import Any

from faults.campaign import Tally, campaign, trials
from faults.fault import Fault
from faults.kinds import FAULTS


def main() -> int:
    """Run the requested campaign and print its table; return the exit status."""
    args = _arguments()
    chosen = [FAULTS[name] for name in args.only or FAULTS]
    for fault in chosen:
        if fault.lacks():
            print(f"{fault.name} is left out: {fault.lacks()}", file=sys.stderr)
    chosen = [fault for fault in chosen if not fault.lacks()]
    if args.trial is not None:
        return _again(chosen[0], args.seed[0], args.trial)
    begin = time.monotonic()

    def times(fault: Fault[Any]) -> int:
        return max(1, round(fault.times * args.scale))

    tallies = {fault.name: Tally() for fault in chosen}
    for seed in args.seed:
        print(f"seed {seed}", file=sys.stderr, flush=True)
        done = campaign(chosen, seed, times, args.workers, partial(_say, seed))
        for name, tally in done.items():
            tallies[name].add(tally)
    command = shlex.join(["python", "-m", "faults", *(f"--seed={seed}" for seed in args.seed)])
    took = f"`{command}`, {(time.monotonic() - begin) / 60:.0f} minutes, {args.workers} processes at once:"
    text = f"{took}\n\n{table(chosen, tallies)}\n"
    if args.into:
        fill(args.into, text)
    print(text, end="")
    return int(any(tally.failures for tally in tallies.values()))


def fill(path: Path, text: str) -> None:
    """Replace the text between a document's two markers.

    Raises:
        ValueError: if a marker is missing.
    """
    before, begin, rest = path.read_text().partition("<!-- faults -->\n")
    _, end, after = rest.partition("<!-- /faults -->\n")
    if not end:
        raise ValueError(f"{path} has no lines <!-- faults --> and <!-- /faults -->")
    path.write_text(f"{before}{begin}{text}{end}{after}")


def table(faults: list[Fault[Any]], tallies: dict[str, Tally]) -> str:
    """Return the results of a campaign as markdown: a table of counts, and a list that explains each kind of fault."""
    rows = ["| kind | trials | failures | at most (95 %) |", "| --- | ---: | ---: | ---: |"]
    notes = []
    for fault in faults:
        tally = tallies[fault.name]
        bound = "-" if tally.failures else f"{100 * tally.bound:.3g} %"
        rows.append(f"| `{fault.name}` | {tally.trials:,} | {len(tally.failures)} | {bound} |")
        note = f"- `{fault.name}`: {fault.what}. Must hold: {fault.holds}."
        notes.append(textwrap.fill(note, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False))
    return "\n".join([*rows, "", *notes])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m faults", description="Inject faults and check that nothing is lost."
    )
    parser.add_argument("--only", action="append", choices=FAULTS, help="this kind alone; may be given again")
    parser.add_argument("--seed", action="append", type=int, help="decides every trial; may be given again")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full counts")
    parser.add_argument("--trial", type=int, help="this one trial of the kind of --only, to see a failure again")
    parser.add_argument("--into", type=Path, help="a document that takes the table between its two markers")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1), help="processes at once")
    args = parser.parse_args()
    args.seed = args.seed or [secrets.randbelow(10**6)]
    if args.trial is not None and len(args.only or ()) != 1:
        parser.error("--trial needs one --only")
    return args


def _again(fault: Fault[Any], seed: int, number: int) -> int:
    tally = trials(fault, seed, [number])
    _say(seed, fault, tally)
    return int(bool(tally.failures))


def _say(seed: int, fault: Fault[Any], tally: Tally) -> None:
    met = ", ".join(f"{word} {count}" for word, count in tally.met.most_common())
    print(f"{fault.name}: {tally.trials} trials in {tally.seconds:.0f} s: {met}", file=sys.stderr, flush=True)
    for failure in tally.failures:
        again = f"python -m faults --only {fault.name} --seed {seed}"
        if failure.number is not None:
            again += f" --trial {failure.number}"
        print(f"FAILED {fault.name}: {failure.reason}\n  again: {again}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
