"""Statistics: pure functions, standard library only, no numbers made up.

`spread` is about the raw values of one run, `chain` about when the runs of an A/B session may be compared, `precision`
about how well they tell an effect, `verdict` about what they then say. `student` holds the distributions.
"""

from dgxlab.stats.chain import (
    BURN_IN_RUNS,
    CYCLES,
    DRIFT_LIMIT,
    EXTRA_CYCLES,
    PLANNING_RUNS,
    SCREEN_DRIFT_LIMIT,
    STEPS,
    Chain,
    another_cycle,
    bound_factor,
    burn_in_needed,
    burn_in_settled,
    cycles_needed,
    drift_flaw,
    hopeless,
    sigma_bound,
)
from dgxlab.stats.power import cycle_range, cycles_at, cycles_for, mde, to_see
from dgxlab.stats.precision import alternates, standard_error
from dgxlab.stats.screen import screen
from dgxlab.stats.spread import mad, median, noise
from dgxlab.stats.student import chi2_quantile, t_quantile, t_tail
from dgxlab.stats.verdict import (
    PROMOTION,
    VERDICTS,
    Verdict,
    fewest_cycles,
    holm,
    invalid,
    judge,
    judge_session,
    least_gain,
    noise_floor,
    promoted,
    worth,
)

__all__ = [
    "BURN_IN_RUNS",
    "CYCLES",
    "DRIFT_LIMIT",
    "EXTRA_CYCLES",
    "PLANNING_RUNS",
    "PROMOTION",
    "SCREEN_DRIFT_LIMIT",
    "STEPS",
    "VERDICTS",
    "Chain",
    "Verdict",
    "alternates",
    "another_cycle",
    "bound_factor",
    "burn_in_needed",
    "burn_in_settled",
    "chi2_quantile",
    "cycle_range",
    "cycles_at",
    "cycles_for",
    "cycles_needed",
    "drift_flaw",
    "fewest_cycles",
    "holm",
    "hopeless",
    "invalid",
    "judge",
    "judge_session",
    "least_gain",
    "mad",
    "mde",
    "median",
    "noise",
    "noise_floor",
    "promoted",
    "screen",
    "sigma_bound",
    "standard_error",
    "t_quantile",
    "t_tail",
    "to_see",
    "worth",
]
