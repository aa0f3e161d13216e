"""The kinds of faults, in the order of the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from faults.fault import Fault
from faults.kinds import agent, clock, crowd, disk, io, power, reboot, root, slurm
from faults.kinds.canary import CANARY
from faults.kinds.client import CLIENT_KILLED
from faults.kinds.commit import COMMIT
from faults.kinds.fuzz import FUZZ
from faults.kinds.leftover import LEFTOVER
from faults.kinds.machine import MACHINE
from faults.kinds.mutants import MUTANTS
from faults.kinds.network import BLACKHOLE, RESET
from faults.kinds.pages import PAGES
from faults.kinds.raw import RAW
from faults.kinds.replaced import REPLACED
from faults.kinds.sshd import SSHD
from faults.kinds.trust import UNTRUSTED
from faults.kinds.versions import VERSIONS
from faults.kinds.yaml import YAML

_ORDER: tuple[Fault[Any], ...] = (
    CLIENT_KILLED,
    RESET,
    BLACKHOLE,
    SSHD,
    UNTRUSTED,
    agent.KILLED,
    LEFTOVER,
    REPLACED,
    reboot.REBOOT,
    power.POWER,
    root.ROOT,
    disk.HOST,
    disk.CLIENT,
    RAW,
    FUZZ,
    MUTANTS,
    YAML,
    CANARY,
    COMMIT,
    PAGES,
    io.RECORD,
    io.AGENT,
    crowd.CROWD,
    VERSIONS,
    clock.SET,
    slurm.SLURM,
    MACHINE,
)

FAULTS: Mapping[str, Fault[Any]] = {fault.name: fault for fault in _ORDER}
