"""Reasons of verdicts, of chains that cannot be judged, and of cycles that do not count: codes and sentences."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum


class VerdictCode(Enum):
    """Reasons that follow from the values; a code's value is its sentence, with parameters in braces."""

    # of a chain
    CUT = "cut after {done} of {planned} cycles: nothing is glued across a gap"
    UNPAIRED = "{baselines} baselines and {candidates} candidates: k candidates need k + 1 baselines"
    TOO_LONG = "{done} cycles where {planned} were planned: at most {extra} may follow"
    NO_CANDIDATES = "no candidates"
    DIRECTION = "better is 'higher' or 'lower', not {better!r}"
    DRIFT_LIMIT = "a drift limit of {limit} is none"
    NO_CYCLE = "there is no cycle {cycle} in a chain of {done}"
    NO_VALUE = "{arm}[{index}] is {value!r:.40}: a measurement is a finite number above 0"
    TOO_FEW = "{valid} of {done} cycles are valid, at least {needed} must be"
    TOO_FEW_FOR_CLAIMS = "{valid} of {done} cycles are valid, at least {needed} must be for {claims} claims"

    # of a cycle
    NO_BASELINE = "a baseline beside it has no value"
    APART = "its baselines are {percent:.1f} % apart, the limit is {limit:.3g} %"
    STEP = (
        "a step: its baselines are {percent:.1f} % apart, the limit is {limit:.3g} %, "
        "and each agrees with its other neighbour"
    )
    NOT_COUNTED = "cycle {cycle} does not count: {flaw}"

    # of an interval
    ABOVE = "the {level:.4g} % interval lies above 0"
    BELOW = "the {level:.4g} % interval lies below 0"
    INSIDE = "the {same_level:.4g} % interval lies inside +-1 %"
    OPEN = "the {level:.4g} % interval contains 0 and the {same_level:.4g} % interval is not inside +-1 %"
    SETTLED_BY = "a new session of {cycles} cycles would probably settle it"
    HOPELESS = "not even a session of {most} cycles would settle an effect of this size"
    HOLM = "held to {percent:g} % over the session's cells (Holm)"
    NO_SPREAD = "the cycles do not differ at all: rounded or copied values hide their noise"
    ALTERNATES = (
        "the runs alternate between high and low beyond chance (negative autocorrelation): "
        "the interval may be too narrow"
    )

    # of a screen
    NO_NOISE_FLOOR = "a screen needs the noise floor of this host, from an A/A session"
    UNKNOWN_NOISE = "{cycles} cycles tell no noise floor"
    NOT_ONE_BRACKET = "a screen is one bracket, not {cycles} cycles"
    BRACKET = "the bracket does not count: {flaw}"
    BEATS_BOTH = (
        "one bracket, in which the candidate beats both baselines by {floors:.3g} noise floors of {percent:.2g} %"
    )
    LOSES_TO_BOTH = (
        "one bracket, in which the candidate loses to both baselines by {floors:.3g} noise floors of {percent:.2g} %"
    )
    WITHIN = "one bracket, in which the candidate is within {floors:.3g} noise floors of {percent:.2g} %"


class VerdictReason(str):
    """The sentence of a reason, which also has its code and parameters; the record keeps only the sentence."""

    code: VerdictCode
    parameters: Mapping[str, object]

    def __new__(cls, code: VerdictCode, **parameters: object) -> VerdictReason:
        """Format the code's sentence with these parameters."""
        reason = super().__new__(cls, code.value.format(**parameters))
        reason.code, reason.parameters = code, parameters
        return reason
