"""`refresh` carries a series to another pin by three-way merges, whole or not at all."""

import re
from pathlib import Path

import pytest

from dgxlab import series
from dgxlab.errors import PatchError, SpecError
from dgxlab.series import Stack
from dgxlab.source import PinCache
from tests.repos import GGML_C, function, git, quiet
from tests.series.conftest import Project, starts_twice, twice


def refresh(project: Project, pin: str, name: str = "pair") -> list[str]:
    return series.refresh(project.root, name, project.cache, pin)


@pytest.fixture
def pair(project: Project) -> Project:
    """The project with a series `pair` of two patches in one file, and one in another."""
    first = project.patch({"ggml/ggml.c": twice("three")}, "ggml : three", GIT_AUTHOR_NAME="Jörg")
    second = project.patch({"ggml/ggml.c": twice("one", twice("three"))}, "ggml : one\n\nwhy")
    third = project.patch({"ggml/ops.c": function("add") + twice("mul", function("mul"))}, "ops")
    project.back()
    project.series("pair", {"three.patch": first, "one.patch": second, "ops.patch": third})
    return project


def test_patches_for_another_pin_leave_those_for_the_first_as_they_are(pair: Project) -> None:
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    before, digest = pair.files("pair"), pair.read("pair").digest
    changed = series.refresh(pair.root, "pair", pair.cache, moved, beside=True)
    assert changed == ["three.patch", "one.patch", "ops.patch"]  # all are new there
    assert (pair.files("pair"), pair.read("pair", pair.pin).digest) == (before, digest)
    assert pair.files(f"pair/{moved[:12]}").keys() == before.keys()
    for pin in (pair.pin, moved):
        assert series.check(pair.root, "pair", pair.cache, pin) == {}
    assert starts_twice(pair.content(pair.apply("pair", pin=moved), "ggml/ggml.c")) == ["one", "three"]
    assert refresh(pair, moved) == []  # it refreshes the patches for that pin


def test_nothing_is_written_through_a_link(pair: Project, tmp_path: Path) -> None:
    """A repository can bring a link of that name, to anywhere."""
    moved, there = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C}), tmp_path / "there"
    there.mkdir()
    (pair.root / "patches" / "pair" / moved[:12]).symlink_to(there)
    with pytest.raises(SpecError, match=f"{moved[:12]} is a symbolic link, and nothing is written there"):
        series.refresh(pair.root, "pair", pair.cache, moved, beside=True)
    git(pair.clone, "checkout", "--quiet", moved)
    with pytest.raises(SpecError, match="is a symbolic link"):
        series.export(pair.root, "pair", pair.cache, moved, pair.clone, beside=True)
    assert list(there.iterdir()) == []


def test_a_part_that_does_not_apply_names_its_series(pair: Project) -> None:
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    part = pair.read("pair:1-2")
    with Stack.on(pair.cache, moved) as stack, pytest.raises(PatchError, match="series pair:1-2: three") as caught:
        stack.push(part, part.patches[0])
    assert caught.value.next == f"dgxlab patch refresh pair --pin {moved}"


def test_function_that_moved(pair: Project) -> None:
    """Each patch follows its function; author and message stay, and the series is well on the new pin."""
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    before = pair.files("pair")
    assert refresh(pair, moved) == ["three.patch", "one.patch"]
    assert series.check(pair.root, "pair", pair.cache, moved) == {}
    assert starts_twice(pair.content(pair.apply("pair", pin=moved), "ggml/ggml.c")) == ["one", "three"]
    after = pair.files("pair")
    assert sorted(name for name in after if after[name] != before[name]) == ["one.patch", "three.patch"]
    assert [text.split(b"\n\ndiff")[0] for text in after.values()] == [
        text.split(b"\n\ndiff")[0] for text in before.values()
    ]


def test_up_to_date(pair: Project) -> None:
    before = pair.files("pair")
    assert refresh(pair, pair.pin) == []
    assert pair.files("pair") == before


def test_with_a_new_cache(pair: Project) -> None:
    """What the second patch was made on is found by applying the series to the pin that it was made for."""
    moved = pair.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    other = PinCache(pair.cache.path.with_name("other"))
    other.ensure(moved, [str(pair.clone)], quiet)
    with pytest.raises(PatchError, match=r"three\.patch .* ggml/ggml\.c") as caught:
        series.refresh(pair.root, "pair", other, moved)
    assert "patch check pair" in caught.value.next
    other.ensure(pair.pin, [str(pair.clone)], quiet)
    assert series.refresh(pair.root, "pair", other, moved) == ["three.patch", "one.patch"]


@pytest.mark.parametrize(
    ("upstream", "problem", "next_"),
    [
        (
            {"ggml/ggml.c": function("zero") + twice("one").replace("start(i + 1)", "begin(i)")},
            r"one\.patch conflicts with .*: ggml/ggml\.c: conflict",
            "resolve it in a checkout, then dgxlab patch export pair --tree CHECKOUT",
        ),
        ({"ggml/ops.c": None}, r"ops\.patch conflicts with .*ggml/ops\.c", "export pair"),
        (
            {"ggml/ggml.c": function("zero") + twice("three")},
            r"three\.patch changes nothing at pin",
            "take it out of patches/pair/series",
        ),
    ],
    ids=["conflict", "file that is gone", "upstream took it"],
)
def test_what_cannot_be_merged(upstream: dict[str, str | None], problem: str, next_: str, pair: Project) -> None:
    """Series, patch and file are named, and every file stays as it was."""
    moved = pair.new_pin(upstream)
    before = pair.files("pair")
    with pytest.raises(PatchError, match=f"series pair: {problem}") as caught:
        refresh(pair, moved)
    assert caught.value.exit_code == 6
    assert next_ in caught.value.next
    assert pair.files("pair") == before


def test_both_add(project: Project) -> None:
    project.series("add", {"add.patch": project.patch({"ggml/new.c": "ours\n"})})
    moved = project.new_pin({"ggml/new.c": "theirs\n"})
    with pytest.raises(PatchError, match=re.escape("ggml/new.c: both add it")):
        refresh(project, moved, "add")


def test_edited_by_hand(pair: Project) -> None:
    path = pair.root / "patches/pair/ops.patch"
    path.write_bytes(path.read_bytes().replace(b"start(i + 1)", b"start(i + 2)"))
    assert refresh(pair, pair.pin) == ["ops.patch"]
    assert "start(i + 2)" in pair.content(pair.apply("pair"), "ggml/ops.c")


def test_damaged_and_moved(pair: Project) -> None:
    """A hunk that does not even fit what it was made on is not searched for in a file that moved."""
    path = pair.root / "patches/pair/three.patch"
    path.write_bytes(path.read_bytes().replace(b"     stop(i);", b"     start(i);"))
    moved = pair.new_pin({"ggml/ggml.c": function("zero").replace("stop", "start") + GGML_C})
    with pytest.raises(PatchError, match=r"three\.patch .*, not even"):
        refresh(pair, moved)
