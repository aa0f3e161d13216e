"""Patch series: read, applied to a pin in the client's cache, checked, carried to another pin, made from a checkout.

series      a series as it lies on the disk, and the tree that it makes of a pin
lines       the `series` file (patchfile: one patch as git format-patch writes it)
stack       patches applied one on another without a work tree (conflict: which hunk does not fit)
checkout    somebody's llama.cpp checkout as a source
edit        check and refresh (export: a series from a checkout)
"""

from dgxlab.series.checkout import apply_tree
from dgxlab.series.edit import check, refresh
from dgxlab.series.export import export
from dgxlab.series.series import Series, apply, list_all, names, read

__all__ = ["Series", "apply", "apply_tree", "check", "export", "list_all", "names", "read", "refresh"]
