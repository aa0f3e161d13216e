"""The shipped series on the real pin."""

from pathlib import Path

import pytest

from dgxlab import series
from dgxlab.source import PinCache
from tests.conftest import OCTOBER, PROJECT
from tests.journals import PIN
from tests.repos import git

pytestmark = pytest.mark.llama


def test_shipped_series_are_well(pin_cache: PinCache) -> None:
    pin_cache.ensure(OCTOBER, ["pypi:llama-cpp-python==0.3.36"], lambda note: None)
    checked = [(name, pin) for name in series.names(PROJECT) for pin in (PIN, OCTOBER)]
    assert [problem for name, pin in checked for problem in series.check(PROJECT, name, pin_cache, pin)] == []


def test_checkout_of_the_pin(pin_cache: PinCache, tmp_path: Path) -> None:
    """The real checkout with the series applied by hand is the series' tree, and exports to the same patch."""
    where = tmp_path / "llama.cpp"
    git(tmp_path, "clone", "--quiet", "--no-checkout", f"file://{pin_cache.path}", str(where))
    git(where, "fetch", "--quiet", "--depth=1", f"file://{pin_cache.path}", PIN)
    git(where, "checkout", "--quiet", "--detach", PIN)
    shipped, folder = series.read(PROJECT, "backend-ops-shapes"), PROJECT / "patches/backend-ops-shapes"
    source = series.apply(pin_cache, PIN, [shipped])
    git(where, "am", "--quiet", "-3", *(str(folder / patch.name) for patch in shipped.patches))
    taken = series.apply_tree(pin_cache, PIN, where)
    assert (taken.tree, taken.dirty) == (source.tree, True)
    exported = series.export(tmp_path, "again", pin_cache, PIN, where)
    assert [patch.content for patch in exported.patches] == [patch.content for patch in shipped.patches]
