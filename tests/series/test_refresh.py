"""`refresh` carries a series to another pin by three-way merges, whole or not at all."""

from __future__ import annotations

import pytest

from dgxlab import series
from dgxlab.errors import PatchError
from dgxlab.series import Refreshed
from dgxlab.source import PinCache
from tests.repos import GGML_C, function
from tests.series.conftest import Project, twice
from tests.series.test_apply import starts_twice


def refresh(project: Project, name: str, pin: str) -> Refreshed:
    """Refresh a series of the project."""
    return series.refresh(project.root, name, project.cache, pin)


def files(project: Project, name: str) -> dict[str, bytes]:
    """Return what lies in a series' folder."""
    return {path.name: path.read_bytes() for path in (project.root / "patches" / name).iterdir()}


@pytest.fixture
def pair(project: Project) -> Project:
    """The project with a series `pair` of two patches in one file, and one in another."""
    first = project.patch({"ggml/ggml.c": twice("three")}, "ggml : three", GIT_AUTHOR_NAME="Jörg")
    second = project.patch({"ggml/ggml.c": twice("one", twice("three"))}, "ggml : one\n\nwhy")
    third = project.patch({"ggml/ops.c": function("add") + twice("mul", function("mul"))}, "ops")
    project.back()
    project.series("pair", {"three.patch": first, "one.patch": second, "ops.patch": third})
    return project


def test_function_that_moved(pair: Project) -> None:
    """Each patch follows its function; author and message stay, and the series is well on the new pin."""
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    before = files(pair, "pair")
    done = refresh(pair, "pair", moved)
    assert done.changed == ("three.patch", "one.patch")
    assert series.check(pair.root, "pair", pair.cache, moved) == []
    assert done.series == pair.read("pair")
    source = pair.apply("pair", pin=moved)
    assert starts_twice(pair.content(source, "ggml/ggml.c")) == ["one", "three"]
    after = files(pair, "pair")
    assert sorted(name for name in after if after[name] != before[name]) == ["one.patch", "three.patch"]
    assert [content.split(b"\n\ndiff")[0] for content in after.values()] == [
        content.split(b"\n\ndiff")[0] for content in before.values()
    ]


def test_up_to_date(pair: Project) -> None:
    """On its own pin nothing is written."""
    before = files(pair, "pair")
    assert refresh(pair, "pair", pair.pin).changed == ()
    assert files(pair, "pair") == before


def test_with_a_new_cache(pair: Project, tmp_path: object) -> None:
    """What the second patch was made on is found by applying the series to the pin that it was made for."""
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    other = PinCache(pair.cache.path.with_name("other"))
    other.ensure(moved, [str(pair.clone)], lambda line: None)
    with pytest.raises(
        PatchError, match=r"three\.patch cannot be merged: the ggml/ggml\.c that it was made on"
    ) as caught:
        series.refresh(pair.root, "pair", other, moved)
    assert "dgxlab patch check pair --pin PIN" in caught.value.next
    other.ensure(pair.pin, [str(pair.clone)], lambda line: None)
    assert series.refresh(pair.root, "pair", other, moved).changed == ("three.patch", "one.patch")


def test_conflict(pair: Project) -> None:
    """A conflict names series, patch, file and line, and leaves every file as it was."""
    changed = twice("one").replace("start(i + 1)", "begin(i)")
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + changed})
    before = files(pair, "pair")
    with pytest.raises(PatchError) as caught:
        refresh(pair, "pair", moved)
    assert caught.value.exit_code == 6
    assert "series pair: one.patch conflicts with" in caught.value.message
    assert caught.value.details == "ggml/ggml.c: conflict"
    assert caught.value.next == "resolve it in a checkout, then dgxlab patch export pair --tree CHECKOUT"
    assert files(pair, "pair") == before


def test_file_that_is_gone(pair: Project) -> None:
    """A file that upstream removed is named."""
    moved = pair.new_pin({"ggml/ops.c": None})
    with pytest.raises(PatchError, match=r"ops\.patch conflicts with .*ggml/ops\.c"):
        refresh(pair, "pair", moved)


def test_both_add(project: Project) -> None:
    """A file that upstream added meanwhile, otherwise, is named."""
    project.series("add", {"add.patch": project.patch({"ggml/new.c": "ours\n"})})
    moved = project.new_pin({"ggml/new.c": "theirs\n"})
    with pytest.raises(PatchError, match=r"conflicts with pin .*: ggml/new\.c: both add it"):
        refresh(project, "add", moved)


def test_upstream_took_it(pair: Project) -> None:
    """A patch that changes nothing any more is to be taken out, and nothing is written."""
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + twice("three")})
    before = files(pair, "pair")
    with pytest.raises(PatchError, match=r"three\.patch changes nothing at pin .*: it is in there already") as caught:
        refresh(pair, "pair", moved)
    assert caught.value.next == "take it out of patches/pair/series"
    assert files(pair, "pair") == before


def test_edited_by_hand(pair: Project) -> None:
    """A patch edited by hand is written anew for its own pin, so that it names what it gives."""
    path = pair.root / "patches/pair/ops.patch"
    path.write_bytes(path.read_bytes().replace(b"start(i + 1)", b"start(i + 2)"))
    assert refresh(pair, "pair", pair.pin).changed == ("ops.patch",)
    assert "start(i + 2)" in pair.content(pair.apply("pair"), "ggml/ops.c")


def test_damaged_and_moved(pair: Project) -> None:
    """A hunk that does not even fit what it was made on is not searched for in a file that moved."""
    path = pair.root / "patches/pair/three.patch"
    path.write_bytes(path.read_bytes().replace(b"     stop(i);", b"     start(i);"))
    moved = pair.new_pin({"ggml/ggml.c": function("zero").replace("stop", "start") + GGML_C})
    with pytest.raises(PatchError, match=r"three\.patch does not apply, not even to what it was made on"):
        refresh(pair, "pair", moved)
