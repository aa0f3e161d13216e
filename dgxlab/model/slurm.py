"""How jobs are submitted to Slurm: the key slurm: of a host."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union


@dataclass(frozen=True)
class Slurm:
    """How jobs of a cluster are submitted: options of sbatch by their long names; "" leaves the cluster's default."""

    partition: str = ""
    gres: str = ""  # `gpu:h200:1`
    time: str = ""  # the limit of a job, in one of Slurm's forms: `2:00:00`
    account: str = ""
    constraint: str = ""
    nodelist: str = ""  # the one node that must run the job; "" is any
    exclusive: bool = False
    extra: tuple[str, ...] = ()  # further options, each a word
    build: Union[Mapping[str, Any], None] = None
    """Options in place of these for a first job that only builds, {} to build on the login node; None: no such job."""

    def options(self) -> list[str]:
        """Return sbatch's options."""
        named = ("partition", "gres", "time", "account", "constraint", "nodelist")
        given = [f"--{name}={getattr(self, name)}" for name in named if getattr(self, name)]
        return [*given, *["--exclusive"] * self.exclusive, *self.extra]

    @property
    def limit_s(self) -> float:
        """The time limit in seconds, inf if it is left to the cluster."""
        return limit_s(self.time) if self.time else math.inf


def limit_s(text: str) -> float:
    """Return a time limit in seconds: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; ValueError for anything else.

    No time at all is no limit.
    """
    form = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,7})(?::(\d{1,2}))?(?::(\d{1,2}))?", text)
    if not form:
        raise ValueError("must be a time as Slurm writes it: 90 (minutes), 2:00:00 or 1-12:00:00")
    days, *parts = form.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None:
        numbers = [0, *numbers, 0][-3:] if len(numbers) == 1 else [0, *numbers][-3:]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) or math.inf
