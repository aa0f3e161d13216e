"""Samples the host's condition beside a job: a program of its own for each source, and its output in the raw files.

The samplers write while a measured program runs, and are read when the run has ended. They are the agent's children and
die with it, but hold none of its locks: one that the driver does not let go must not make a dead job look alive.
Whatever one does (hang, die, print nonsense), the job goes on, and its runs say what they lack.
"""

from __future__ import annotations

import calendar
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dgxlab.agent import child, facts
from dgxlab.agent.conditions import Conditions, Sample, number
from dgxlab.agent.environment import base_env
from dgxlab.agent.facts import PERIOD_S
from dgxlab.agent.gpus import BASIC, HELP, choose, sampling
from dgxlab.agent.journal import whole_lines
from dgxlab.agent.processors import Contention
from dgxlab.model.events import HOST

READY_S = 2.0
"""How long the first run waits for the samplers' first lines, so that nothing starts up beside it."""
STOP_S = 1.0
"""How long the end of a job waits for them."""
FRESH_S = 5.0
"""A sample that is older says nothing of this instant: its sampler hangs, or is gone."""

Parse = Callable[[str], "Sample | None"]


class Sampler:
    """One program that prints a line for every look.

    Args:
        argv: What to start.
        path: Where its output goes, its errors too.
        parse: Makes a sample of a line; None for a line that is no sample.
    """

    def __init__(self, argv: Sequence[str], path: Path, parse: Parse) -> None:
        self._argv = argv
        self._path = path
        self._parse = parse
        self._child: subprocess.Popen[bytes] | None = None
        self._offset = 0
        self._newest: dict[str, Sample] = {}

    def start(self) -> None:
        """Start it; one that cannot be started gives no samples."""
        with contextlib.suppress(OSError):
            # nvidia-smi prints local time
            self._child = child.beside(self._argv, env={**base_env(), "TZ": "UTC"}, output=self._path)

    @property
    def settled(self) -> bool:
        """Whether it has printed something, or never will."""
        return self._child is None or self._path.stat().st_size > 0 or self._child.poll() is not None

    def read(self, begin: float, end: float) -> list[Sample]:
        """Return the samples of a span of time; what came before it is not asked for again."""
        within: list[Sample] = []
        while self._child and (chunk := whole_lines(self._path, self._offset)):
            self._offset += len(chunk)
            samples = list(filter(None, map(self._parse, chunk.decode(errors="replace").splitlines())))
            self._newest.update((sample.device, sample) for sample in samples)
            within += [sample for sample in samples if begin <= sample.at <= end]
        return within

    def newest(self) -> list[Sample]:
        """Return the last sample of each device; a run that begins after this call loses none by it."""
        self.read(0.0, 0.0)
        return list(self._newest.values())

    def stop(self, deadline: float) -> None:
        """End it; one that cannot be ended is left to the kernel, which will."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, deadline - time.monotonic()))


class Telemetry:
    """What one job's samplers see.

    Args:
        raw: The job's raw folder.
        agent: The agent's file.
        gpus: Those that the job measures on, by uuid their name; the processor is watched in any case.
    """

    def __init__(self, raw: Path, agent: Path, gpus: Mapping[str, str]) -> None:
        self._gpus = gpus
        self._fields = choose(facts.outputs([HELP])[0]) if gpus else dict(BASIC)
        sense = [sys.executable, "-ES", str(agent), "sense"]
        self._samplers = [Sampler(sense, raw / "telemetry-host.jsonl", parse_host)]
        if gpus:
            ask = sampling(tuple(gpus), tuple(self._fields.values()), PERIOD_S)
            self._samplers.append(Sampler(ask, raw / "telemetry-gpu.csv", partial(parse_gpu, tuple(self._fields))))
        self._started = False

    def start(self) -> None:
        """Start sampling and wait until it goes on; harmless to repeat."""
        if self._started:
            return
        self._started = True
        for sampler in self._samplers:
            sampler.start()
        deadline = time.monotonic() + READY_S
        while not all(sampler.settled for sampler in self._samplers) and time.monotonic() < deadline:
            time.sleep(0.005)

    def state(self) -> dict[str, Any]:
        """Return the host's condition at this instant."""
        return facts.state(self._fields)

    def around(
        self,
        run: child.Ended,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        contention: Contention,
        threads: int,
    ) -> Conditions:
        """Return the conditions of a run of so many threads that has ended, between two states."""
        end = run.started + run.seconds
        samples = [sample for sampler in self._samplers for sample in sampler.read(run.started, end)]
        return Conditions(samples, before, after, self._gpus, run.seconds, contention, threads)

    def now(self) -> dict[str, Mapping[str, float]]:
        """Return what was sampled last, by device; nothing of one that has not been heard of lately.

        Between runs only: it passes over the samples of a run that goes on.
        """
        due = time.time() - FRESH_S
        newest = [sample for sampler in self._samplers for sample in sampler.newest()]
        return {sample.device: sample.values for sample in newest if sample.at >= due}

    def temperature(self) -> float | None:
        """Return how hot the job's devices are, the hottest of its GPUs or else the processor; None if not known."""
        now = self.now()
        seen = [now.get(gpu, {}).get("temperature.gpu") for gpu in self._gpus]
        known = [c for c in seen or [now.get(HOST, {}).get("cpu_temp_c")] if c is not None]
        return max(known, default=None)

    def stop(self) -> None:
        """End the samplers."""
        deadline = time.monotonic() + STOP_S
        for sampler in self._samplers:
            sampler.stop(deadline)


def parse_host(line: str) -> Sample | None:
    """Read a line of `facts.sense`."""
    try:
        row = json.loads(line)
        at = float(row.pop("t"))
        values = {name: float(value) for name, value in row.items() if value is not None}
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return None
    return Sample(at, HOST, values) if all(map(math.isfinite, values.values())) else None


def parse_gpu(fields: Sequence[str], line: str) -> Sample | None:
    """Read a line of nvidia-smi's that begins with the time, in UTC; its header is none, nor is half a line."""
    time_of_day, *words = (word.strip() for word in line.split(","))
    whole, _, fraction = time_of_day.partition(".")  # 2026/11/21 13:07:17.328
    try:
        at = calendar.timegm(time.strptime(whole, "%Y/%m/%d %H:%M:%S")) + float(f"0.{fraction or 0}")
    except ValueError:
        return None
    if len(words) != len(fields):
        return None
    row = dict(zip(fields, words, strict=True))
    values = {name: number(word) for name, word in row.items()}
    return Sample(at, row["uuid"], {name: value for name, value in values.items() if value is not None})
