"""The use cases: run an experiment, follow what runs, settle what was left behind.

run     from an experiment to results, in one call
todo    what is not up to date
jobs    detached work: start, follow, settle
"""

from dgxlab.lab.base import Lab, Watch
from dgxlab.lab.jobs import conclude, follow, settle, start
from dgxlab.lab.run import Outcome, resolve, run
from dgxlab.lab.todo import Todo, ask, left_to_do, make_plan

__all__ = [
    "Lab",
    "Outcome",
    "Todo",
    "Watch",
    "ask",
    "conclude",
    "follow",
    "left_to_do",
    "make_plan",
    "resolve",
    "run",
    "settle",
    "start",
]
