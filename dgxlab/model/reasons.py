"""Reasons why a run's numbers are doubtful or missing, or a gate failed: a code with parameters, and its sentence.

All sentences about a run or a gate are made here. Older agents wrote the sentence alone: it is the parameter `words`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, unique
from typing import Any

from dgxlab.model.wire import JsonHooks
from dgxlab.units import duration


@dataclass(frozen=True)
class _Computed:
    """A sentence that needs more than a template; used like one, since a bare function in an Enum is no member."""

    by: Callable[..., str]

    def format(self, **params: Any) -> str:
        return self.by(**params)


_NOT_ENGAGED = "the path under test did not run"


def left_running(program: str, left: list[str] | tuple[str, ...]) -> str:
    """Return the sentence for processes `left` by a program, such as `pid 77 (sleep)`."""
    return f"{program} left processes running, which were ended: {', '.join(left)}"


def _summary(backend: str, summaries: int, last_case: str) -> str:
    if summaries == 1:
        return f"the summary for backend {backend} cannot be read"
    if summaries:
        return f"{summaries} summaries for backend {backend}, not one"
    after = f"the program stopped after {last_case}" if last_case else "no case was run"
    return f"no summary for backend {backend}: {after}"


def _throttle(name: str) -> _Computed:
    def words(seconds: float = 0.0, hits: int = 0, samples: int = 0, gpu: str = "") -> str:
        return f"{name} {f'for {duration(seconds)}' if seconds else f'in {hits} of {samples} samples'}{_on(gpu)}"

    return _Computed(words)


def _on(gpu: str) -> str:
    """Return ` on GPU` if a job has several GPUs."""
    return f" on {gpu}" if gpu else ""


def _ran(threads: int, processors: int) -> str:
    return f"{threads} thread{'s' * (threads != 1)} on {processors} processor{'s' * (processors != 1)}"


def _ended(how: str) -> _Computed:
    return _Computed(lambda last="", **params: how.format(**params) + (f": {last}" if last else ""))


@unique
class Code(Enum):
    """Codes for flags, for runs that do not count, and for failed gates; the value is a template of the sentence."""

    HW_THERMAL = _throttle("HW thermal slowdown")
    POWER_BRAKE = _throttle("HW power brake")
    HW_SLOWDOWN = _throttle("HW slowdown")
    SW_THERMAL = _throttle("SW thermal slowdown")
    SW_POWER_CAP = _throttle("SW power cap")
    STUCK_CLOCK = _Computed(
        lambda mhz, least, gpu="": (
            f"the GPU was busy at {mhz:.0f} MHz: a GB10 below {least:.0f} MHz under load is in its stuck low-power"
            f" state, which a reboot does not end; shut it down and take it off its power supply for a minute{_on(gpu)}"
        )
    )
    BOOT = "the machine was started again"
    DRIVER = "the NVIDIA driver changed from {before} to {after}"
    SWAP_IN = "{mib:.0f} MiB came back from swap"
    OOM_KILL = "the kernel killed programs for lack of memory ({n:.0f})"
    LEFT_RUNNING = _Computed(left_running)
    RUN_QUEUE = _Computed(
        lambda threads, processors, waited, others=None: (
            f"its processes ({_ran(threads, processors)}) waited {waited:.2f} s per second for a processor"
            f"{'' if others is None else f'; others used {others:.2f} processors'}"
        )
    )
    BURST = "in its worst second, each of its busy threads waited {waited:.2f} s for a processor that others used"
    OTHERS_CPU = _Computed(
        lambda threads, processors, others: (
            f"others used {others:.2f} processors beside its {_ran(threads, processors)}"
        )
    )
    TOO_SHORT = (
        "it took less than {least:g} s, too short to see whether other programs used its processors:"
        " raise its repetitions or tokens, or take a larger model"
    )
    STEAL = _Computed(
        lambda share: f"the hypervisor gave {100 * share:.1f} % of the processors' time to other machines"
    )
    PSI = _Computed(lambda share: f"a program on the host waited for a processor {100 * share:.0f} % of the time")
    NO_TELEMETRY = _Computed(
        lambda n, due, nvidia_smi, gpu="": (
            f"{n or 'no'} samples {f'from nvidia-smi{_on(gpu)}' if nvidia_smi else 'of the host'}"
            f" where {due:.0f} were due"
        )
    )
    WAITED = _Computed(lambda seconds: f"the device had to be waited for, {duration(seconds)}, right before it")
    WARMING = _Computed(lambda block_s: f"warmed the device, as runs in the first {duration(block_s)} of a block do")
    UNSETTLED = "the burn-in did not settle in {runs} runs"

    EXITED = _ended("{program} ended with exit status {status}")
    KILLED = _ended("{program} was killed by {signal}")
    TIMED_OUT = _ended("{program} ran past its limit of {limit_s:g} s and was killed")
    TOO_LONG = _ended("{program} printed more than {mib} MiB")
    ROWS = _Computed(lambda program, problems, disk="": f"{program}: {'; '.join(problems)}{disk}")
    NOT_ENGAGED = f"{_NOT_ENGAGED}: {{marker!r}} is not on {{program}}'s stderr"
    ENGAGED_TOO = "the path under test ran in the baseline too: {marker!r} is on {program}'s stderr"
    STRANGER = "a foreign compute process appeared: {processes}"
    UNWATCHED = "nvidia-smi did not say who computes"

    COMMAND = "{where}: {problem}"
    NOT_RUN = "{where} was not run"
    NO_TEXT = "{where} printed no text"
    GENERATED = _Computed(
        lambda where, count, wanted: (
            f"{where} generated {'an unknown number' if count is None else count} of {wanted} tokens"
        )
    )
    NO_PROMPT = "{where} does not say how many tokens the prompt has"
    MD5 = "expected md5 {wanted}, got {md5}"
    OTHER_TEXT = "the text is another one than in {where}: md5 {md5}, there {other}"
    ARM_NOT_ENGAGED = f"{_NOT_ENGAGED}: {{marker!r}} is not on the stderr of {{where}}"
    BOTH_ENGAGED = "the path under test ran on both sides: {marker!r} is on the stderr of {where} too"
    KLD_TOO_SMALL = "the KLD in {where} prints as {kld:.6f}: too small to divide by; a larger n_embd makes it larger"
    KLD_RATIO = _Computed(
        lambda where, kld, other, limit: (
            f"the KLD is {kld / other:.3g} times that in {where} ({kld:.6f} and {other:.6f}),"
            f" at most {limit:g} is allowed"
        )
    )
    KLD = "the KLD is {kld:.6f}, at most {limit:g} is allowed"
    PPL_RATIO = "the perplexity is {ratio:.6f} times the reference's, at most {limit:g} and its inverse are allowed"
    NO_TEST = "no test was run"
    NO_VERDICT = "the harness does not end with 'passed'"
    TESTS = "expected {wanted} tests, got {passed}"
    CASES_FAILED = _Computed(
        lambda case, more, how="": f"failed: {case}{f' ({how})' if how else ''}{f' and {more} more' if more else ''}"
    )
    NOT_TESTED = _Computed(
        lambda backend, seen: (
            f"backend {backend} was not tested: the {f'program has {seen}' if seen else 'output names none'}"
        )
    )
    SUMMARY = _Computed(_summary)
    NO_CASES = "ran 0 of 0 cases: nothing was tested"
    CASE_COUNT = "expected {wanted}, got {passed}/{total}"
    SOME_PASSED = "{passed} of {total} cases passed"
    UNSUPPORTED = "expected {wanted} unsupported cases, got {unsupported}"
    OTHER_OPS = "{others} of {cases} cases are not of {op}, as {case}"
    CASE_LIST = "expected the list of cases {wanted}, got {got}: {cases} cases, {repeated} of them repeated"
    CONTRADICTION = "{what}"
    NO_OK = "the output does not say 'Backend {backend}: OK'"
    DISK = "{reason}{disk}"
    AGAIN = "run again: {reasons}"
    FLAKY = _Computed(lambda cases: f"flaky here and not in the baseline: {', '.join(cases)}")
    BASELINE_COUNT = "the candidate ran {total} cases, the baseline {baseline}"
    BASELINE_CASES = "not the baseline's cases: {differs}"

    TOLD = "{words}"  # for the sentence of an older agent, which wrote no code

    @property
    def key(self) -> str:
        """The code as journals have it, in lower case."""
        return self.name.lower()


@dataclass(frozen=True)
class Reason(JsonHooks):
    """Why a run does not count or a gate failed: the key of a `Code`, and its sentence's parameters as plain JSON."""

    code: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return sentence(self.code, self.params)

    @staticmethod
    def pre_load(value: Any) -> Any:
        """Return the fields of a reason; an older agent wrote its sentence alone."""
        return {"code": Code.TOLD.key, "params": {"words": value}} if isinstance(value, str) else value


def reason(code: Code, **params: Any) -> Reason:
    """Return the `Reason` for a code, given the parameters of its sentence."""
    return Reason(code.key, params)


def sentence(code: str, params: Mapping[str, Any]) -> str:
    """Return the sentence for a code; for an unknown one, of a newer agent, the code and its parameters."""
    if "words" in params:
        return str(params["words"])
    try:
        return str(Code[code.upper()].value.format(**params))
    except (ValueError, LookupError, TypeError):
        return " ".join((code, *(f"{name}={value}" for name, value in params.items())))


def says_not_engaged(words: str) -> bool:
    """Return whether the sentence of a reason, which the record keeps, says that the path under test did not run."""
    return words.startswith(_NOT_ENGAGED)
