"""Why a run's numbers are doubtful or missing: a code with parameters in the journal, a sentence for people.

Every sentence about a run is made here. Journals of older agents hold the sentence itself, which is kept under `words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dgxlab.units import duration


class Code(Enum):
    """What happened to a run. The first group are the kinds of flags, the second one why a run does not count."""

    HW_THERMAL = "hw_thermal"
    POWER_BRAKE = "power_brake"
    HW_SLOWDOWN = "hw_slowdown"
    SW_THERMAL = "sw_thermal"
    SW_POWER_CAP = "sw_power_cap"
    STUCK_CLOCK = "stuck_clock"
    BOOT = "boot"
    DRIVER = "driver"
    SWAP_IN = "swap_in"
    OOM_KILL = "oom_kill"
    LEFT_RUNNING = "left_running"
    RUN_QUEUE = "run_queue"
    OTHERS_CPU = "others_cpu"
    STEAL = "steal"
    PSI = "psi"
    NO_TELEMETRY = "no_telemetry"
    WAITED = "waited"
    WARMING = "warming"
    UNSETTLED = "unsettled"

    EXITED = "exited"
    KILLED = "killed"
    TIMED_OUT = "timed_out"
    TOO_LONG = "too_long"
    ROWS = "rows"
    NOT_ENGAGED = "not_engaged"
    ENGAGED_TOO = "engaged_too"
    STRANGER = "stranger"
    UNWATCHED = "unwatched"

    TOLD = "told"
    """An older agent's own sentence, in `words`."""


@dataclass(frozen=True)
class Reason:
    """A code with its parameters, which are plain JSON."""

    code: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return sentence(self.code, self.params)

    @property
    def not_engaged(self) -> bool:
        """Whether the path under test did not run; see `says_not_engaged` for a sentence of the record."""
        return self.code == Code.NOT_ENGAGED.value or says_not_engaged(str(self.params.get("words", "")))


def reason(code: Code, **params: Any) -> Reason:
    """Return a reason that this program knows."""
    return Reason(code.value, params)


def sentence(code: str, params: Mapping[str, Any]) -> str:
    """Return a code and its parameters in words; a code of a newer agent is named with them."""
    if "words" in params:
        return str(params["words"])
    try:
        return _SENTENCES[Code(code)](**params)
    except (ValueError, LookupError, TypeError):
        return " ".join((code, *(f"{name}={value}" for name, value in params.items())))


_NOT_ENGAGED = "the path under test did not run"


def says_not_engaged(words: str) -> bool:
    """Tell whether a sentence, which is all that the record keeps of a reason, is that of NOT_ENGAGED."""
    return words.startswith(_NOT_ENGAGED)


def left_running(program: str, left: list[str] | tuple[str, ...]) -> str:
    """Say what a program left running."""
    return f"{program} left processes running, which were ended: {', '.join(left)}"


def _throttle(name: str) -> Callable[..., str]:
    def words(seconds: float = 0.0, hits: int = 0, samples: int = 0, gpu: str = "") -> str:
        return f"{name} {f'for {duration(seconds)}' if seconds else f'in {hits} of {samples} samples'}{_on(gpu)}"

    return words


def _on(gpu: str) -> str:
    """Name the GPU where a job has several."""
    return f" on {gpu}" if gpu else ""


def _ran(threads: int, processors: int) -> str:
    return f"{_counted(threads, 'thread')} on {_counted(processors, 'processor')}"


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


def _ended(how: str) -> Callable[..., str]:
    def words(last: str = "", **params: Any) -> str:
        return how.format(**params) + (f": {last}" if last else "")

    return words


_SENTENCES: Mapping[Code, Callable[..., str]] = {
    Code.HW_THERMAL: _throttle("HW thermal slowdown"),
    Code.POWER_BRAKE: _throttle("HW power brake"),
    Code.HW_SLOWDOWN: _throttle("HW slowdown"),
    Code.SW_THERMAL: _throttle("SW thermal slowdown"),
    Code.SW_POWER_CAP: _throttle("SW power cap"),
    Code.STUCK_CLOCK: lambda mhz, least, gpu="": (
        f"the GPU was busy at {mhz:.0f} MHz: a GB10 below {least:.0f} MHz under load is in its stuck low-power"
        f" state, which a reboot does not end; shut it down and take it off its power supply for a minute{_on(gpu)}"
    ),
    Code.BOOT: lambda: "the machine was started again",
    Code.DRIVER: lambda before, after: f"the NVIDIA driver changed from {before} to {after}",
    Code.SWAP_IN: lambda mib: f"{mib:.0f} MiB came back from swap",
    Code.OOM_KILL: lambda n: f"the kernel killed programs for lack of memory ({n:.0f})",
    Code.LEFT_RUNNING: left_running,
    Code.RUN_QUEUE: lambda threads, processors, waited, others=None: (
        f"its {_ran(threads, processors)} waited {waited:.2f} s a second for their turn"
        f"{'' if others is None else f'; others used {others:.2f} processors'}"
    ),
    Code.OTHERS_CPU: lambda threads, processors, others: (
        f"others used {others:.2f} processors beside its {_ran(threads, processors)}"
    ),
    Code.STEAL: lambda share: f"the hypervisor gave {100 * share:.1f} % of the processors' time to other machines",
    Code.PSI: lambda share: f"a program on the host waited for a processor {100 * share:.0f} % of the time",
    Code.NO_TELEMETRY: lambda n, due, nvidia_smi, gpu="": (
        f"{n or 'no'} samples {f'from nvidia-smi{_on(gpu)}' if nvidia_smi else 'of the host'} where {due:.0f} were due"
    ),
    Code.WAITED: lambda seconds: f"the device had to be waited for, {duration(seconds)}, right before it",
    Code.WARMING: lambda block_s: f"warmed the device, as runs in the first {duration(block_s)} of a block do",
    Code.UNSETTLED: lambda runs: f"the burn-in did not settle in {runs} runs",
    Code.EXITED: _ended("{program} ended with exit status {status}"),
    Code.KILLED: _ended("{program} was killed by {signal}"),
    Code.TIMED_OUT: _ended("{program} ran past its limit of {limit_s:g} s and was killed"),
    Code.TOO_LONG: _ended("{program} printed more than {mib} MiB"),
    Code.ROWS: lambda program, problems, disk="": f"{program}: {'; '.join(problems)}{disk}",
    Code.NOT_ENGAGED: lambda marker, program: f"{_NOT_ENGAGED}: {marker!r} is not on {program}'s stderr",
    Code.ENGAGED_TOO: lambda marker, program: (
        f"the path under test ran in the baseline too: {marker!r} is on {program}'s stderr"
    ),
    Code.STRANGER: lambda processes: f"a foreign compute process appeared: {processes}",
    Code.UNWATCHED: lambda: "nvidia-smi did not say who computes",
}
