"""The record held against what it was made from: the plans, the tools' own rows, the chains.

`check` says everything that is wrong with a database. `merge` adds another one, and keeps the result where it is sound.
"""

from dgxlab.audit.record import check, merge

__all__ = ["check", "merge"]
