"""Sample the host's condition during a job, with one program (sampler) for the host and one for its GPUs.

The samplers print to raw files while a measured program runs; the files are read when the run has ended. Samplers are
the agent's children and die with it, but hold none of its locks: a sampler stuck in the driver must not make a dead job
look alive. If a sampler hangs, dies or prints nonsense, the job goes on, and its runs are flagged.
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
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dgxlab.agent import child
from dgxlab.agent.conditions import Conditions, DeviceSample, number
from dgxlab.agent.environment import ask, base_env
from dgxlab.agent.facts import PERIOD_S, boot_id, condition
from dgxlab.agent.files import whole_lines
from dgxlab.agent.gpus import BASIC, HELP, choose, compute_processes, parse_gpus, query, sampling
from dgxlab.agent.processors import Contention
from dgxlab.model.events import HOST

_State = Mapping[str, Any]

READY_S = 2.0  # max wait for the samplers' first lines, so that no sampler starts up during the first run
STOP_S = 1.0  # max wait for the end of the samplers at the end of a job
FRESH_S = 5.0  # max age of a current sample; if the last one is older, the sampler hangs or has died


class Sampler:
    """One program that prints a line per sample to a file, where `parse` returns None for other lines.

    If the program cannot be started, there are no samples.
    """

    def __init__(self, argv: Sequence[str], path: Path, parse: Callable[[str], DeviceSample | None]) -> None:
        self._path, self._parse, self._offset = path, parse, 0
        self.newest: dict[str, DeviceSample] = {}  # the newest sample that was read of each device
        self._child: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            # nvidia-smi prints local time
            self._child = child.beside(argv, env={**base_env(), "TZ": "UTC"}, output=path)

    @property
    def settled(self) -> bool:
        """Whether the program has printed something, or has ended."""
        return self._child is None or self._path.stat().st_size > 0 or self._child.poll() is not None

    def read(self, begin: float, end: float) -> list[DeviceSample]:
        """Read what was printed since the last call, and return the samples from `begin` to `end`, in Unix seconds."""
        within: list[DeviceSample] = []
        while self._child and (chunk := whole_lines(self._path, self._offset)):
            self._offset += len(chunk)
            samples = list(filter(None, map(self._parse, chunk.decode(errors="replace").splitlines())))
            self.newest.update((sample.device, sample) for sample in samples)
            within += [sample for sample in samples if begin <= sample.at <= end]
        return within

    def stop(self, deadline: float) -> None:
        """Kill the program, and wait for its end until `deadline` (of time.monotonic)."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, deadline - time.monotonic()))


class Telemetry:
    """The samplers of one job: one for the host, in the zipapp `agent`, and one for its `gpus` (names by uuid).

    `known` has the uuids of all GPUs in the host's facts. A part of a cluster's node may have more.
    """

    def __init__(self, raw: Path, agent: Path, gpus: Mapping[str, str], known: Collection[str | None]) -> None:
        self._raw, self._agent, self.gpus, self._known = raw, agent, gpus, known
        self._fields = choose(ask([HELP])[0].text) if gpus else dict(BASIC)
        self._samplers: list[Sampler] = []
        self.copies: Mapping[str, float] | None = None
        """How fast each GPU copies, in GB/s; None before that is measured."""

    def start(self) -> None:
        """Start the samplers and wait for their first samples; safe to repeat."""
        if self._samplers:
            return
        sense = [sys.executable, "-ES", str(self._agent), "sense"]
        self._samplers.append(Sampler(sense, self._raw / "telemetry-host.jsonl", parse_host))
        if self.gpus:
            argv = sampling(tuple(self.gpus), tuple(self._fields.values()), PERIOD_S)
            parse = partial(parse_gpu, tuple(self._fields))
            self._samplers.append(Sampler(argv, self._raw / "telemetry-gpu.csv", parse))
        deadline = time.monotonic() + READY_S
        while not all(sampler.settled for sampler in self._samplers) and time.monotonic() < deadline:
            time.sleep(0.005)

    def state(self) -> dict[str, Any]:
        """Return the condition of the host and of its known GPUs now, as `parts.State` with the compute processes."""
        (gpus,) = ask([query(tuple(self._fields.values()))])
        return {
            "boot_id": boot_id(),
            **condition(),
            "gpus": [row for row in parse_gpus(tuple(self._fields), gpus.text) if row["uuid"] in self._known],
            "gpu_processes": compute_processes(),
        }

    def around(
        self, run: child.Exit, states: tuple[_State, _State], contention: Contention, threads: int
    ) -> Conditions:
        """Return the conditions of a run that has ended, given the states before and after it; reads the samples."""
        end = run.started + run.seconds
        samples = [sample for sampler in self._samplers for sample in sampler.read(run.started, end)]
        return Conditions(samples, *states, self.gpus, run.seconds, contention, threads, self.copies or {})

    def now(self) -> dict[str, Mapping[str, float]]:
        """Return the values of each device's last sample, unless it is older than FRESH_S.

        Call it between runs only: the samples that it reads are in the conditions of no run.
        """
        due, newest = time.time() - FRESH_S, dict[str, DeviceSample]()
        for sampler in self._samplers:
            sampler.read(0.0, 0.0)
            newest |= sampler.newest
        return {device: sample.values for device, sample in newest.items() if sample.at >= due}

    def temperature(self) -> float | None:
        """Return the temperature now of the job's hottest GPU, or of the processor if it uses none; None if unknown."""
        now = self.now()
        seen = [now.get(gpu, {}).get("temperature.gpu") for gpu in self.gpus]
        known = [c for c in seen or [now.get(HOST, {}).get("cpu_temp_c")] if c is not None]
        return max(known, default=None)

    def stop(self) -> None:
        """End the samplers."""
        deadline = time.monotonic() + STOP_S
        for sampler in self._samplers:
            sampler.stop(deadline)


def parse_host(line: str) -> DeviceSample | None:
    """Return the sample in a line of `facts.sense`, None if it cannot be parsed."""
    try:
        row = json.loads(line)
        at = float(row.pop("t"))
        values = {name: float(value) for name, value in row.items() if value is not None}
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        return None
    return DeviceSample(at, HOST, values) if all(map(math.isfinite, values.values())) else None


def parse_gpu(fields: Sequence[str], line: str) -> DeviceSample | None:
    """Return the sample in a line that `gpus.sampling` prints in UTC; None for the header or an incomplete line."""
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
    return DeviceSample(at, row["uuid"], {name: value for name, value in values.items() if value is not None})
