"""A host that reboots: a small part of the campaign, and that the machine is one that can."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from faults.campaign import trials
from faults.kinds.reboot import REBOOT, Machine, _machine


def test_reboots() -> None:
    """A job that it ends is lost and never runs; one whose sshd alone ends goes on."""
    tally = trials(REBOOT, 7, range(2))
    assert tally.failures == []
    assert {word.split(",")[0] for word in tally.met} == {"sshd", "power"}


def on(place: Machine, command: str) -> str:
    """Return what a shell on the machine prints, once there is one."""
    ask = ["ssh", "-F", place.there.config, "box", command]
    deadline = time.monotonic() + 10
    while (ran := subprocess.run(ask, capture_output=True, text=True, check=False)).returncode == 255:
        assert time.monotonic() < deadline, ran.stderr
        time.sleep(0.1)
    return ran.stdout.strip()


def test_a_machine_that_loses_power() -> None:
    """Nothing that ran on it goes on, and its kernel has another name for the new boot; an sshd alone ends no job."""
    boot, running = "cat /proc/sys/kernel/random/boot_id", "pidof tail || echo none"
    with _machine() as place:
        first = on(place, boot)
        assert first == place.boot_id.read_text().strip()
        on(place, "setsid -f tail -f /dev/null >/dev/null 2>&1")
        pids = on(place, running)
        place.restart_sshd()
        assert on(place, running) == pids != "none"
        place.lose_power()
        assert on(place, running) == "none"
        assert on(place, boot) not in (first, Path("/proc/sys/kernel/random/boot_id").read_text().strip())
