"""What the chains of a job say, from the evidence in the record.

`judge` computes verdicts from runs, gates and the way the job ended; `record` writes them down, `recorded` reads them.
They depend on nothing but the job itself, so they can be computed again at any time, which is what `check` does.
"""

from dgxlab.judgement.record import check, noise_floors, record, recorded, reject
from dgxlab.judgement.verdicts import Judged, counted, judge, whole

__all__ = ["Judged", "check", "counted", "judge", "noise_floors", "record", "recorded", "reject", "whole"]
