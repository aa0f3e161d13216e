"""The use cases: run an experiment, follow what runs, settle what was left behind, keep hosts in order.

run     from an experiment to results, in one call
ab      a session that compares two experiments, or one with itself
outlook  what such a session will see
todo    what is not up to date
provision  what a host lacks is sent: build tools, sources, synthetic models
jobs    detached work: start, follow, settle, adopt what others started
raw     what the programs printed, fetched and checked
clean   what may go from a host
doctor  what is missing, here and on a host
"""

from dgxlab.lab.ab import Session, ab
from dgxlab.lab.archive import content, copy, unpack
from dgxlab.lab.base import Lab, Side, Watch
from dgxlab.lab.jobs import adopt, conclude, find, follow, settle, start
from dgxlab.lab.outlook import Outlook, outlook
from dgxlab.lab.raw import describe, kept
from dgxlab.lab.run import Outcome, resolve, run
from dgxlab.lab.todo import Todo, ask, left_to_do, make_plan

__all__ = [
    "Lab",
    "Outcome",
    "Outlook",
    "Session",
    "Side",
    "Todo",
    "Watch",
    "ab",
    "adopt",
    "ask",
    "conclude",
    "content",
    "copy",
    "describe",
    "find",
    "follow",
    "kept",
    "left_to_do",
    "make_plan",
    "outlook",
    "resolve",
    "run",
    "settle",
    "start",
    "unpack",
]
