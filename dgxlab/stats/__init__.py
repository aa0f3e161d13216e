"""Statistics: pure functions, standard library only, no numbers made up.

`spread` is about the raw values of one run, `chain` about when the runs of an A/B session may be compared, `verdict`
about what they then say; `student` holds the distribution that this needs.
"""

from dgxlab.stats.chain import (
    CYCLES,
    DRIFT_LIMIT,
    SCREEN_DRIFT_LIMIT,
    Chain,
    another_cycle,
    burn_in_needed,
    burn_in_settled,
    cycles_needed,
    drift_flaw,
    hopeless,
)
from dgxlab.stats.power import mde, to_see
from dgxlab.stats.screen import screen
from dgxlab.stats.spread import mad, median, noise
from dgxlab.stats.student import t_quantile, t_tail
from dgxlab.stats.verdict import (
    VERDICTS,
    Verdict,
    holm,
    invalid,
    judge,
    judge_session,
    noise_floor,
    promoted,
    standard_error,
)

__all__ = [
    "CYCLES",
    "DRIFT_LIMIT",
    "SCREEN_DRIFT_LIMIT",
    "VERDICTS",
    "Chain",
    "Verdict",
    "another_cycle",
    "burn_in_needed",
    "burn_in_settled",
    "cycles_needed",
    "drift_flaw",
    "holm",
    "hopeless",
    "invalid",
    "judge",
    "judge_session",
    "mad",
    "mde",
    "median",
    "noise",
    "noise_floor",
    "promoted",
    "screen",
    "standard_error",
    "t_quantile",
    "t_tail",
    "to_see",
]
