"""Statistics: pure functions, standard library only, no numbers made up.

`distributions` holds medians and quantiles, `chain` when the runs of an A/B session may be compared, `precision` how
well they tell an effect, `verdict` what they then say, and `reasons` why.
"""

from dgxlab.stats.chain import (
    BURN_IN_RUNS,
    CYCLES,
    EXTRA_CYCLES,
    PLANNING_RUNS,
    SCREEN_DRIFT_LIMIT,
    STEPS,
    Chain,
    another_cycle,
    burn_in_needed,
    burn_in_settled,
    cycles_needed,
    drift_flaw,
    hopeless,
)
from dgxlab.stats.distributions import mad, median, t_tail
from dgxlab.stats.precision import (
    alternates,
    bound_factor,
    cycle_range,
    cycles_at,
    cycles_for,
    fewest_cycles,
    mde,
    sigma_bound,
    to_see,
)
from dgxlab.stats.reasons import VerdictCode, VerdictReason
from dgxlab.stats.verdict import (
    PROMOTION,
    VERDICTS,
    Verdict,
    invalid,
    judge,
    judge_session,
    least_gain,
    noise_floor,
    promoted,
    screen,
    worth,
)
