"""The tree that series make of a pin: exact, the same for everybody, and never in the wrong function."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.errors import PatchError, SpecError
from dgxlab.model import Source
from tests.repos import GGML_C, LLAMA, cache_of, function, git, write
from tests.series.conftest import Project, twice

CHILD = """
import sys
from pathlib import Path
from dgxlab import series
from dgxlab.source import PinCache
root, cache, pin = sys.argv[1:]
made = series.apply(PinCache(Path(cache)), pin, [series.read(Path(root), "shout")])
print(made.commit, made.tree)
"""


CONFIG = """
[user]
    name = {user}
    email = {user}@example.com
[core]
    autocrlf = true
[diff]
    renames = false
    noprefix = true
    context = 9
[apply]
    whitespace = fix
    ignoreWhitespace = change
[i18n]
    commitEncoding = latin1
[commit]
    gpgSign = true
"""


def starts_twice(text: str) -> list[str]:
    """Return the functions of the toy's C text that start twice."""
    return [body.split("(")[0] for body in text.split("void ")[1:] if "start(i + 1)" in body]


def test_empty(project: Project) -> None:
    """Nothing applied is the pin itself."""
    tree = git(project.clone, "rev-parse", f"{project.pin}^{{tree}}")
    assert project.apply() == Source(project.pin, tree, project.pin)


def test_one_patch(shout: Project) -> None:
    """A patch becomes a commit on the pin with the patch's author and date, and our committer."""
    source = shout.apply("shout")
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["three"]
    assert source.series == (shout.read("shout").ref,)
    assert not source.dirty
    assert shout.cache.git.run("rev-parse", f"{source.commit}^{{tree}}") == source.tree
    shown = shout.cache.git.run("show", "--no-patch", "--date=raw", "--format=%P|%an|%ad|%cn|%cd|%B", source.commit)
    assert shown.strip() == f"{shout.pin}|Ann Author|1700000000 +0100|dgxlab|946684800 +0000|ggml : shout"


def test_patches_and_overlays_in_order(project: Project) -> None:
    """Each patch is a commit of its own, in the order of the series file; overlays come last."""
    first = project.patch({"ggml/ggml.c": twice("one")}, "first")
    second = project.patch({"ggml/ggml.c": twice("two", twice("one"))}, "second")
    project.back()
    write(project.root, {"kernels/k.cuh": "// k\n"})
    project.series("both", {"b.patch": first, "a.patch": second}, "overlay kernels/k.cuh ggml/src/k.cuh")
    source = project.apply("both")
    log = project.cache.git.run("log", "--reverse", "--format=%s", f"{project.pin}..{source.commit}").splitlines()
    assert log == ["first", "second", "overlays of both"]
    assert starts_twice(project.content(source, "ggml/ggml.c")) == ["one", "two"]
    assert project.content(source, "ggml/src/k.cuh") == "// k\n"
    project.series("wrong", {"a.patch": second, "b.patch": first})
    with pytest.raises(PatchError, match=r"series wrong: a\.patch does not apply"):
        project.apply("wrong")


def test_overlay_edit_changes_the_tree(shout: Project) -> None:
    """An edited kernel is another tree at once; put back, it is the first one again."""
    write(shout.root, {"kernels/k.cuh": "// one\n"})
    shout.series("kernel", {}, "overlay kernels/k.cuh ggml/src/k.cuh")
    first = shout.apply("shout", "kernel")
    write(shout.root, {"kernels/k.cuh": "// two\n"})
    second = shout.apply("shout", "kernel")
    assert first.tree != second.tree
    assert shout.content(second, "ggml/src/k.cuh") == "// two\n"
    write(shout.root, {"kernels/k.cuh": "// one\n"})
    assert shout.apply("shout", "kernel") == first


def test_everybody_gets_the_same_commit(shout: Project, tmp_path: Path) -> None:
    """Two users with other names, time zones, languages and git settings get identical commits."""
    write(shout.root, {"kernels/k.cuh": "// k \r\n"})
    path = shout.root / "patches/shout/series"
    path.write_text(path.read_text() + "overlay kernels/k.cuh ggml/src/k.cuh\n")
    outcomes = []
    for user, zone in (("A", "Asia/Tokyo"), ("B", "America/St_Johns")):
        home = tmp_path / user
        write(home, {".gitconfig": CONFIG.format(user=user), ".config/git/attributes": "* text=auto eol=crlf ident\n"})
        env = {
            **os.environ,
            "HOME": str(home),
            "TZ": zone,
            "LC_ALL": "C",
            "GIT_AUTHOR_NAME": user,
            "GIT_DIR": "/nowhere",
        }
        cache = tmp_path / f"cache-{user}"
        cache_of(cache, shout.clone, shout.pin)
        argv = [sys.executable, "-c", CHILD, str(shout.root), str(cache), shout.pin]
        outcomes.append(subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.split())
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 2
    source = shout.apply("shout")
    assert outcomes[0] == [source.commit, source.tree]
    assert shout.content(source, "ggml/src/k.cuh") == "// k \r\n"


def test_remembered(shout: Project) -> None:
    """What was applied before is looked up: it comes even when there is nothing left to apply it to."""
    source = shout.apply("shout")
    shout.cache.git.run("update-ref", "-d", f"refs/dgxlab/pins/{shout.pin}")
    assert shout.apply("shout") == source
    shout.series("other", {"x.patch": (shout.root / "patches/shout/shout.patch").read_bytes()})
    with pytest.raises(SpecError, match="is not in the cache"):
        shout.apply("other")


def test_remembered_outcome_that_was_lost(shout: Project) -> None:
    """A remembered commit that is gone is made again, the same."""
    source = shout.apply("shout")
    (shout.cache.path / "objects" / source.commit[:2] / source.commit[2:]).unlink()
    assert shout.apply("shout") == source
    (shout.cache.path / "objects" / source.tree[:2] / source.tree[2:]).unlink()
    assert shout.apply("shout") == source
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["three"]


def test_pin_that_is_not_here(shout: Project) -> None:
    """Without the pin the error is about the pin."""
    with pytest.raises(SpecError, match="pin aaaaaaaaaaaa is not in the cache"):
        shout.apply("shout", pin="a" * 40)
    with pytest.raises(SpecError, match="40 hex digits"):
        shout.apply("shout", pin="HEAD")


def test_moved(shout: Project, tmp_path: Path) -> None:
    """Where git would patch the wrong function without a word, the patch is refused as moved, hunk by hunk."""
    moved = shout.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    write(tmp_path / "plain", {"ggml/ggml.c": function("zero") + GGML_C})
    text = (shout.root / "patches/shout/shout.patch").read_bytes()
    git(tmp_path / "plain", "apply", "-", input=text, env={"GIT_CEILING_DIRECTORIES": str(tmp_path)})
    assert starts_twice((tmp_path / "plain/ggml/ggml.c").read_text()) == ["two"]  # the hazard is real
    blobs = [git(shout.clone, "rev-parse", f"{pin}:ggml/ggml.c")[:12] for pin in (shout.pin, moved)]
    with pytest.raises(PatchError) as caught:
        shout.apply("shout", pin=moved)
    assert caught.value.exit_code == 6
    assert caught.value.message == (
        f"series shout: shout.patch does not apply to pin {moved[:12]}: ggml/ggml.c moved: the patch was made on blob "
        f"{blobs[0]}, there it is {blobs[1]}"
    )
    assert caught.value.next == f"dgxlab patch refresh shout --pin {moved}"


def test_moved_in_many_places(project: Project) -> None:
    """Every file that moved is listed."""
    text = twice("one", twice("four"))
    project.series("many", {"m.patch": project.patch({"ggml/ggml.c": text, "ggml/ops.c": None, "ggml/new.c": "n\n"})})
    moved = project.new_pin(
        {
            "ggml/ggml.c": "// head\n" + GGML_C.replace("stop(i)", "halt(i)", 1),
            "ggml/ops.c": None,
            "ggml/new.c": "here\n",
        }
    )
    with pytest.raises(PatchError) as caught:
        project.apply("many", pin=moved)
    lines = caught.value.details.splitlines()
    assert re.fullmatch(r"ggml/ggml.c moved: .*", lines[0])
    assert lines[1:] == ["ggml/new.c is there already", "ggml/ops.c is not there"]


def test_hunk_that_does_not_apply(shout: Project) -> None:
    """A patch whose text was damaged names file and line."""
    path = shout.root / "patches/shout/shout.patch"
    path.write_bytes(path.read_bytes().replace(b"     start(i);\n+", b"     begin(i);\n+"))
    with pytest.raises(PatchError, match=r"series shout: shout\.patch .* ggml/ggml\.c:19"):
        shout.apply("shout")


def test_edited_by_hand(shout: Project) -> None:
    """A patch that applies but does not give the file that it names is refused: it may be in the wrong place."""
    path = shout.root / "patches/shout/shout.patch"
    good = path.read_bytes()
    for old, new in ((b"start(i + 1)", b"start(i + 2)"), (b"@@ -19,2 +19,3 @@", b"@@ -11,2 +11,3 @@")):
        assert old in good
        path.write_bytes(good.replace(old, new))
        with pytest.raises(
            PatchError, match=r"does not give the ggml/ggml\.c that it names: it was edited by hand"
        ) as e:
            shout.apply("shout")
        assert e.value.next.startswith(f"dgxlab patch refresh shout --pin {shout.pin}")


def test_overlay_over_a_file_of_the_pin(shout: Project) -> None:
    """An overlay never hides a file of upstream's, nor becomes one inside a file."""
    write(shout.root, {"kernels/k.c": "// k\n"})
    for dest, cause in (
        ("ggml/ops.c", r"ggml/ops\.c is there already"),
        ("ggml", "is there already"),
        ("README.md/k.c", r"makes a folder of README\.md"),
    ):
        shout.series("kernel", {}, f"overlay kernels/k.c {dest}")
        with pytest.raises(PatchError, match=cause):
            shout.apply("kernel")


def test_two_series_side_by_side(shout: Project) -> None:
    """Series that change other files are just put on top of one another; the order names another source."""
    shout.series("ops", {"ops.patch": shout.patch({"ggml/ops.c": "// ops\n"})})
    shout.back()
    source = shout.apply("shout", "ops")
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["three"]
    assert shout.content(source, "ggml/ops.c") == "// ops\n"
    other = shout.apply("ops", "shout")
    assert (other.tree, other.commit != source.commit) == (source.tree, True)
    assert [ref.name for ref in source.series] == ["shout", "ops"]


def test_two_series_in_one_file(shout: Project) -> None:
    """Series made on the pin that change the same file are merged, each reaching its own function."""
    first = shout.patch({"ggml/ggml.c": function("zero") + GGML_C}, "first")
    second = shout.patch({"ggml/ggml.c": function("zero") + twice("one")}, "second")
    shout.back()
    shout.series("front", {"first.patch": first, "second.patch": second})
    source = shout.apply("front", "shout")
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["one", "three"]
    assert shout.apply("shout", "front").tree == source.tree


def test_two_series_that_conflict(shout: Project) -> None:
    """Series that change the same line end in a conflict that names both sides' place."""
    shout.series("rival", {"r.patch": shout.patch({"ggml/ggml.c": twice("three").replace("i + 1", "i + 9")})})
    shout.back()
    with pytest.raises(PatchError) as caught:
        shout.apply("shout", "rival")
    assert "series rival: r.patch conflicts with what is on pin" in caught.value.message
    assert "ggml/ggml.c: conflict" in caught.value.message


def test_second_series_is_held_to_the_pin_too(shout: Project) -> None:
    """A series that moved at this pin is not smuggled in by merging it with another."""
    shout.series("ops", {"ops.patch": shout.patch({"ggml/ggml.c": twice("one")})})
    moved = shout.new_pin({"README.md": "new\n", "ggml/ggml.c": function("zero") + GGML_C})
    git(shout.clone, "reset", "--quiet", "--hard", moved)
    fresh = shout.patch({"ggml/ggml.c": function("zero") + twice("four")})
    shout.series("fresh", {"f.patch": fresh})
    with pytest.raises(PatchError, match=r"series ops: ops\.patch does not apply to pin .* moved"):
        shout.apply("fresh", "ops", pin=moved)


def test_clashes(shout: Project) -> None:
    """The same series twice, and two overlays of one file, are refused."""
    write(shout.root, {"kernels/a.c": "a\n", "kernels/b.c": "b\n"})
    shout.series("a", {}, "overlay kernels/a.c ggml/k.c")
    shout.series("b", {}, "overlay kernels/b.c ggml/k.c")
    with pytest.raises(SpecError, match=r"series a and b both overlay ggml/k\.c"):
        shout.apply("a", "b")
    with pytest.raises(SpecError, match="series shout is there twice"):
        shout.apply("shout", "shout")


def test_diff_in_the_message(shout: Project) -> None:
    """A diff in the commit message does nothing."""
    path = shout.root / "patches/shout/shout.patch"
    hidden = b"--- a/CMakeLists.txt\n+++ b/CMakeLists.txt\n@@ -1 +1 @@\n-project(toy)\n+project(evil)\n"
    path.write_bytes(path.read_bytes().replace(b"\ndiff --git", hidden + b"\ndiff --git", 1))
    source = shout.apply("shout")
    assert shout.content(source, "CMakeLists.txt") == LLAMA["CMakeLists.txt"]


@pytest.mark.parametrize(
    ("header", "value", "problem"),
    [
        (b"From: .*", b"", "has no author"),
        (b"Date: .*", b"", "has no date"),
        (b"Subject: .*", b"", "has no subject"),
        (b"Date: .*", b"Date: some day", "invalid date"),
    ],
)
def test_header_that_is_wrong(header: bytes, value: bytes, problem: str, shout: Project) -> None:
    """A patch without author, date or subject is refused; a date that git cannot read is not replaced by today."""
    path = shout.root / "patches/shout/shout.patch"
    path.write_bytes(re.sub(header + b"\n", value + b"\n" * bool(value), path.read_bytes(), count=1))
    with pytest.raises(PatchError, match=problem):
        shout.apply("shout")


def test_many_at_once(shout: Project) -> None:
    """Processes that apply the same series at the same moment all get the same commit."""
    argv = [sys.executable, "-c", CHILD, str(shout.root), str(shout.cache.path), shout.pin]
    children = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outcomes = {child.communicate(timeout=60)[0] for child in children}
    source = shout.apply("shout")
    assert outcomes == {f"{source.commit} {source.tree}\n"}
    assert [child.returncode for child in children] == [0] * 4
    assert list((shout.cache.path / "tmp").iterdir()) == []
