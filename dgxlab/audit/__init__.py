"""The record held against what it was made from: plans, tools' own rows, imported files, chains.

`check` says everything that is wrong with a database; `merge` adds another one, and keeps the result only if nothing is.
"""

from dgxlab.audit.record import check, merge

__all__ = ["check", "merge"]
