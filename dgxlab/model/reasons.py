"""Reasons why a run's numbers are doubtful or missing, or a gate failed: a code with parameters, and its sentence.

All sentences about a run or a gate are made here. Older journals hold the sentence itself, kept in `words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from dgxlab.units import duration


class Code(Enum):
    """Codes for flags, for runs that do not count, and for failed gates."""

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

    COMMAND = "command"
    NOT_RUN = "not_run"
    NO_TEXT = "no_text"
    GENERATED = "generated"
    NO_PROMPT = "no_prompt"
    MD5 = "md5"
    OTHER_TEXT = "other_text"
    ARM_NOT_ENGAGED = "arm_not_engaged"
    BOTH_ENGAGED = "both_engaged"
    KLD_TOO_SMALL = "kld_too_small"
    KLD_RATIO = "kld_ratio"
    KLD = "kld"
    PPL_RATIO = "ppl_ratio"
    NO_TEST = "no_test"
    NO_VERDICT = "no_verdict"
    TESTS = "tests"
    CASES_FAILED = "cases_failed"
    NOT_TESTED = "not_tested"
    SUMMARY = "summary"
    NO_CASES = "no_cases"
    CASE_COUNT = "case_count"
    SOME_PASSED = "some_passed"
    UNSUPPORTED = "unsupported"
    OTHER_OPS = "other_ops"
    CASE_LIST = "case_list"
    CONTRADICTION = "contradiction"
    SIGNALLED = "signalled"
    STATUS = "status"
    NO_OK = "no_ok"
    DISK = "disk"
    AGAIN = "again"
    FLAKY = "flaky"
    BASELINE_COUNT = "baseline_count"
    BASELINE_CASES = "baseline_cases"

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
    """Return the sentence for a code; an unknown code of a newer agent is shown with its parameters."""
    if "words" in params:
        return str(params["words"])
    try:
        return _SENTENCES[Code(code)](**params)
    except (ValueError, LookupError, TypeError):
        return " ".join((code, *(f"{name}={value}" for name, value in params.items())))


_NOT_ENGAGED = "the path under test did not run"


def says_not_engaged(words: str) -> bool:
    """Return whether a sentence is that of NOT_ENGAGED; the record keeps only sentences of reasons."""
    return words.startswith(_NOT_ENGAGED)


def left_running(program: str, left: list[str] | tuple[str, ...]) -> str:
    """Return a sentence on processes that a program left running."""
    return f"{program} left processes running, which were ended: {', '.join(left)}"


def _summary(backend: str, summaries: int, last_case: str) -> str:
    if summaries == 1:
        return f"the summary for backend {backend} cannot be read"
    if summaries:
        return f"{summaries} summaries for backend {backend}, not one"
    after = f"the program stopped after {last_case}" if last_case else "no case was run"
    return f"no summary for backend {backend}: {after}"


def _throttle(name: str) -> Callable[..., str]:
    def words(seconds: float = 0.0, hits: int = 0, samples: int = 0, gpu: str = "") -> str:
        return f"{name} {f'for {duration(seconds)}' if seconds else f'in {hits} of {samples} samples'}{_on(gpu)}"

    return words


def _on(gpu: str) -> str:
    """Return ` on GPU` if a job has several GPUs."""
    return f" on {gpu}" if gpu else ""


def _ran(threads: int, processors: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)} on {processors} processor{'s' * (processors != 1)}"


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
    Code.COMMAND: "{where}: {problem}".format,
    Code.NOT_RUN: "{where} was not run".format,
    Code.NO_TEXT: "{where} printed no text".format,
    Code.GENERATED: lambda where, count, wanted: (
        f"{where} generated {'an unknown number' if count is None else count} of {wanted} tokens"
    ),
    Code.NO_PROMPT: "{where} does not say how many tokens the prompt has".format,
    Code.MD5: "expected md5 {wanted}, got {md5}".format,
    Code.OTHER_TEXT: "the text is another one than in {where}: md5 {md5}, there {other}".format,
    Code.ARM_NOT_ENGAGED: f"{_NOT_ENGAGED}: {{marker!r}} is not on the stderr of {{where}}".format,
    Code.BOTH_ENGAGED: "the path under test ran on both sides: {marker!r} is on the stderr of {where} too".format,
    Code.KLD_TOO_SMALL: (
        "the KLD in {where} prints as {kld:.6f}: too small to compare with, a wider model has more".format
    ),
    Code.KLD_RATIO: lambda where, kld, other, limit: (
        f"the KLD is {kld / other:.3g} times that in {where} ({kld:.6f} and {other:.6f}), at most {limit:g} is allowed"
    ),
    Code.KLD: "the KLD is {kld:.6f}, at most {limit:g} is allowed".format,
    Code.PPL_RATIO: (
        "the perplexity is {ratio:.6f} times the reference's, at most {limit:g} and its inverse are allowed".format
    ),
    Code.NO_TEST: "no test was run".format,
    Code.NO_VERDICT: "the harness does not end with 'passed'".format,
    Code.TESTS: "expected {wanted} tests, got {passed}".format,
    Code.CASES_FAILED: lambda case, more: f"failed: {case}{f' and {more} more' if more else ''}",
    Code.NOT_TESTED: lambda backend, seen: (
        f"backend {backend} was not tested: the {f'program has {seen}' if seen else 'output names none'}"
    ),
    Code.SUMMARY: _summary,
    Code.NO_CASES: "ran 0 of 0 cases: nothing was tested".format,
    Code.CASE_COUNT: "expected {wanted}, got {passed}/{total}".format,
    Code.SOME_PASSED: "{passed} of {total} cases passed".format,
    Code.UNSUPPORTED: "expected {wanted} unsupported cases, got {unsupported}".format,
    Code.OTHER_OPS: "{others} of {cases} cases are not of {op}, as {case}".format,
    Code.CASE_LIST: "expected the list of cases {wanted}, got {got}: {cases} cases, {repeated} of them repeated".format,
    Code.CONTRADICTION: "{what}".format,
    Code.SIGNALLED: "{program} was ended by a signal".format,
    Code.STATUS: "{program} ended with exit status {status}".format,
    Code.NO_OK: "the output does not say 'Backend {backend}: OK'".format,
    Code.DISK: "{reason}{disk}".format,
    Code.AGAIN: "run again: {reasons}".format,
    Code.FLAKY: lambda cases: f"flaky here and not in the baseline: {', '.join(cases)}",
    Code.BASELINE_COUNT: "the candidate ran {total} cases, the baseline {baseline}".format,
    Code.BASELINE_CASES: "not the baseline's cases: {differs}".format,
}
