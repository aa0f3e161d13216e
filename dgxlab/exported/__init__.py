"""What was measured, handed on as the tools themselves would have printed it: JSON lines, csv, SQLite.

llama.cpp's scripts/compare-llama-bench.py reads each of them. Rows carry the columns of llama.cpp, and after them where
they come from, which that script passes over. `build_commit` is ours: llama.cpp's own is the same for a patched build.
Rows of an imported file are handed on as they were printed, and in no file with others.
"""

from dgxlab.exported.imports import collect_imported
from dgxlab.exported.rows import TABLES, Exported, collect
from dgxlab.exported.write import SUFFIXES, write

__all__ = ["SUFFIXES", "TABLES", "Exported", "collect", "collect_imported", "write"]
