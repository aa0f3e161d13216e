"""The tree that series make of a pin: exact, the same for every user, and never in the wrong function."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dgxlab.errors import PatchError, SpecError
from dgxlab.model import Source
from tests.repos import GGML_C, LLAMA, cache_of, function, git, write
from tests.series.conftest import Project, starts_twice, twice

CHILD = """
import sys
from pathlib import Path
from dgxlab import series
from dgxlab.source import PinCache
root, cache, pin = sys.argv[1:]
source = series.apply(PinCache(Path(cache)), pin, [series.read(Path(root), "shout")])
print(source.commit, source.tree)
"""

CONFIG = """
[user] name = {user}
[user] email = {user}@example.com
[core] autocrlf = true
[diff] renames = false
[diff] noprefix = true
[diff] context = 9
[apply] whitespace = fix
[apply] ignoreWhitespace = change
[i18n] commitEncoding = latin1
[commit] gpgSign = true
"""


def test_nothing_applied_is_the_pin(project: Project) -> None:
    tree = git(project.clone, "rev-parse", f"{project.pin}^{{tree}}")
    assert project.apply() == Source(project.pin, tree, project.pin)


def test_one_patch(shout: Project) -> None:
    """A patch becomes a commit on the pin with the patch's author and date, and our committer."""
    source = shout.apply("shout")
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["three"]
    assert (source.series, source.dirty) == ((shout.read("shout").ref,), False)
    assert shout.cache.git.run("rev-parse", f"{source.commit}^{{tree}}") == source.tree
    shown = shout.cache.git.run("show", "--no-patch", "--date=raw", "--format=%P|%an|%ad|%cn|%cd|%B", source.commit)
    assert shown.strip() == f"{shout.pin}|Ann Author|1700000000 +0100|dgxlab|946684800 +0000|ggml : shout"


def test_patches_and_overlays_in_order(project: Project) -> None:
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
    with pytest.raises(PatchError, match=r"series wrong: a\.patch"):
        project.apply("wrong")


def test_overlay_edit_changes_the_tree(shout: Project) -> None:
    shout.series("kernel", {}, "overlay kernels/k.cuh ggml/src/k.cuh")
    sources = []
    for text in ("// one\n", "// two\n", "// one\n"):
        write(shout.root, {"kernels/k.cuh": text})
        sources.append(shout.apply("shout", "kernel"))
        assert shout.content(sources[-1], "ggml/src/k.cuh") == text
    assert sources[0] == sources[2] != sources[1]
    assert sources[0].tree != sources[1].tree


def test_every_user_gets_the_same_commit(shout: Project, tmp_path: Path) -> None:
    """Other names, time zones, languages and git settings change nothing."""
    write(shout.root, {"kernels/k.cuh": "// k \r\n"})
    path = shout.root / "patches/shout/series"
    path.write_text(path.read_text() + "overlay kernels/k.cuh ggml/src/k.cuh\n")
    outcomes = []
    for user, zone in (("A", "Asia/Tokyo"), ("B", "America/St_Johns")):
        home, cache = tmp_path / user, tmp_path / f"cache-{user}"
        write(home, {".gitconfig": CONFIG.format(user=user), ".config/git/attributes": "* text=auto eol=crlf ident\n"})
        settings = {"HOME": str(home), "TZ": zone, "LC_ALL": "C", "GIT_AUTHOR_NAME": user, "GIT_DIR": "/nowhere"}
        cache_of(cache, shout.clone, shout.pin)
        argv = [sys.executable, "-c", CHILD, str(shout.root), str(cache), shout.pin]
        child = subprocess.run(argv, env={**os.environ, **settings}, capture_output=True, text=True, check=True)
        outcomes.append(child.stdout.split())
    source = shout.apply("shout")
    assert outcomes == [[source.commit, source.tree]] * 2
    assert shout.content(source, "ggml/src/k.cuh") == "// k \r\n"


def test_an_outcome_is_remembered(shout: Project) -> None:
    """It is looked up even when the pin is gone; a commit or tree that is gone is made again, the same."""
    source = shout.apply("shout")
    for lost in (source.commit, source.tree):
        (shout.cache.path / "objects" / lost[:2] / lost[2:]).unlink()
        assert shout.apply("shout") == source
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["three"]
    shout.cache.git.run("update-ref", "-d", f"refs/dgxlab/pins/{shout.pin}")
    assert shout.apply("shout") == source
    shout.series("other", {"x.patch": (shout.root / "patches/shout/shout.patch").read_bytes()})
    with pytest.raises(SpecError, match="in the cache"):
        shout.apply("other")


def test_pin_that_is_not_here(shout: Project) -> None:
    with pytest.raises(SpecError, match="aaaaaaaaaaaa is not"):
        shout.apply("shout", pin="a" * 40)
    with pytest.raises(SpecError, match="40 hex digits"):
        shout.apply("shout", pin="HEAD")


def test_moved(shout: Project, tmp_path: Path) -> None:
    """Where git would patch the wrong function without an error, the patch is refused as moved."""
    moved = shout.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    write(tmp_path / "plain", {"ggml/ggml.c": function("zero") + GGML_C})
    text = (shout.root / "patches/shout/shout.patch").read_bytes()
    git(tmp_path / "plain", "apply", "-", input=text, env={"GIT_CEILING_DIRECTORIES": str(tmp_path)})
    assert starts_twice((tmp_path / "plain/ggml/ggml.c").read_text()) == ["two"]  # the hazard is real
    blobs = [git(shout.clone, "rev-parse", f"{pin}:ggml/ggml.c")[:12] for pin in (shout.pin, moved)]
    with pytest.raises(PatchError, match=rf"shout\.patch .* {moved[:12]}: ggml/ggml\.c .*{blobs[0]}.*{blobs[1]}") as e:
        shout.apply("shout", pin=moved)
    assert (e.value.exit_code, e.value.next) == (6, f"dgxlab patch refresh shout --pin {moved}")


def test_every_file_that_moved_is_listed(project: Project) -> None:
    text = twice("one", twice("four"))
    project.series("many", {"m.patch": project.patch({"ggml/ggml.c": text, "ggml/ops.c": None, "ggml/new.c": "n\n"})})
    changed = "// head\n" + GGML_C.replace("stop(i)", "halt(i)", 1)
    moved = project.new_pin({"ggml/ggml.c": changed, "ggml/ops.c": None, "ggml/new.c": "here\n"})
    with pytest.raises(PatchError) as caught:
        project.apply("many", pin=moved)
    files = [line.split()[0] for line in caught.value.details.splitlines()]
    assert files == ["ggml/ggml.c", "ggml/new.c", "ggml/ops.c"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (rb"     start\(i\);\n\+", b"     begin(i);\n+", r"does not apply, .* ggml/ggml\.c:19"),
        # it applies, but may be in the wrong place
        (rb"start\(i \+ 1\)", b"start(i + 2)", "edited by hand"),
        (rb"@@ -19,2 \+19,3 @@", b"@@ -11,2 +11,3 @@", "edited by hand"),
        (rb"From: .*\n", b"", "has no author"),
        (rb"Date: .*\n", b"", "has no date"),
        (rb"Subject: .*\n", b"", "has no subject"),
        # a date that git cannot read is not replaced by today
        (rb"Date: .*\n", b"Date: some day\n", "invalid date"),
    ],
)
def test_patch_that_was_edited(old: bytes, new: bytes, problem: str, shout: Project) -> None:
    path = shout.root / "patches/shout/shout.patch"
    text, count = re.subn(old, new, path.read_bytes(), count=1)
    path.write_bytes(text)
    assert count == 1
    with pytest.raises(PatchError, match=rf"series shout: shout\.patch .*{problem}") as caught:
        shout.apply("shout")
    if problem == "edited by hand":
        assert caught.value.next == f"dgxlab patch refresh shout --pin {shout.pin}"


def test_diff_in_the_message_does_nothing(shout: Project) -> None:
    path = shout.root / "patches/shout/shout.patch"
    hidden = b"--- a/CMakeLists.txt\n+++ b/CMakeLists.txt\n@@ -1 +1 @@\n-project(toy)\n+project(evil)\n"
    path.write_bytes(path.read_bytes().replace(b"\ndiff --git", hidden + b"\ndiff --git", 1))
    assert shout.content(shout.apply("shout"), "CMakeLists.txt") == LLAMA["CMakeLists.txt"]


@pytest.mark.parametrize(
    ("dest", "cause"),
    [
        ("ggml/ops.c", r"ggml/ops\.c is there already"),
        ("ggml", "is there already"),
        ("README.md/k.c", r"makes a folder of README\.md"),
    ],
)
def test_overlay_over_a_file_of_the_pin(dest: str, cause: str, shout: Project) -> None:
    write(shout.root, {"kernels/k.c": "// k\n"})
    shout.series("kernel", {}, f"overlay kernels/k.c {dest}")
    with pytest.raises(PatchError, match=cause):
        shout.apply("kernel")


def test_two_series_side_by_side(shout: Project) -> None:
    """Series that change other files are just put on top of one another; another order is another source."""
    shout.series("ops", {"ops.patch": shout.patch({"ggml/ops.c": "// ops\n"})})
    shout.back()
    source, other = shout.apply("shout", "ops"), shout.apply("ops", "shout")
    assert starts_twice(shout.content(source, "ggml/ggml.c")) == ["three"]
    assert shout.content(source, "ggml/ops.c") == "// ops\n"
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
    shout.series("rival", {"r.patch": shout.patch({"ggml/ggml.c": twice("three").replace("i + 1", "i + 9")})})
    shout.back()
    with pytest.raises(PatchError, match=r"series rival: r\.patch .* on pin .* already: ggml/ggml\.c: conflict"):
        shout.apply("shout", "rival")


def test_a_merged_series_must_apply_to_the_pin_too(shout: Project) -> None:
    shout.series("ops", {"ops.patch": shout.patch({"ggml/ggml.c": twice("one")})})
    moved = shout.new_pin({"README.md": "new\n", "ggml/ggml.c": function("zero") + GGML_C})
    git(shout.clone, "reset", "--quiet", "--hard", moved)
    shout.series("fresh", {"f.patch": shout.patch({"ggml/ggml.c": function("zero") + twice("four")})})
    with pytest.raises(PatchError, match=r"series ops: ops\.patch .* moved"):
        shout.apply("fresh", "ops", pin=moved)


def test_clashes(shout: Project) -> None:
    write(shout.root, {"kernels/a.c": "a\n", "kernels/b.c": "b\n"})
    shout.series("a", {}, "overlay kernels/a.c ggml/k.c")
    shout.series("b", {}, "overlay kernels/b.c ggml/k.c")
    with pytest.raises(SpecError, match=r"a and b overlay ggml/k\.c with kernels/a\.c and kernels/b\.c"):
        shout.apply("a", "b")
    with pytest.raises(SpecError, match="there twice"):
        shout.apply("shout", "shout")


def test_series_share_a_kernels_file(shout: Project) -> None:
    write(shout.root, {"kernels/a.c": "a\n", "kernels/b.c": "b\n"})
    shout.series("a", {}, "overlay kernels/a.c ggml/a.c")
    shout.series("b", {}, "overlay kernels/a.c ggml/a.c\noverlay kernels/b.c ggml/b.c")
    source = shout.apply("a", "b")
    assert [shout.content(source, f"ggml/{name}") for name in ("a.c", "b.c")] == ["a\n", "b\n"]


def test_many_at_once(shout: Project) -> None:
    """Processes that apply the same series at the same moment all get the same commit."""
    argv = [sys.executable, "-c", CHILD, str(shout.root), str(shout.cache.path), shout.pin]
    children = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outcomes = {child.communicate(timeout=60)[0] for child in children}
    source = shout.apply("shout")
    assert outcomes == {f"{source.commit} {source.tree}\n"}
    assert [child.returncode for child in children] == [0] * 4
    assert list((shout.cache.path / "tmp").iterdir()) == []
