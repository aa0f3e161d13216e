"""`export` turns a checkout into a series that gives the checkout's tree again."""

import subprocess
from pathlib import Path

import pytest

from dgxlab import series
from dgxlab.errors import SpecError
from dgxlab.series import Series
from tests.repos import commit, function, git, write
from tests.series.conftest import Project, twice
from tests.series.test_tree import state


def export(project: Project, name: str = "mine", message: str = "") -> Series:
    return series.export(project.root, name, project.cache, project.pin, project.clone, message)


def check_out(project: Project, commit_id: str) -> None:
    """Put the clone at a commit of the cache."""
    git(project.clone, "fetch", "--quiet", str(project.cache.path), commit_id)
    git(project.clone, "checkout", "--quiet", "FETCH_HEAD")


def in_git(path: Path) -> None:
    git(path.parent, "init", "--quiet")
    git(path.parent, "add", path.name)


@pytest.fixture(autouse=True)
def _me() -> None:
    write(Path.home(), {".gitconfig": "[user]\n name = Me Myself\n email = me@example.com\n"})


def test_commits(project: Project) -> None:
    """A patch for each commit, in order, named by its subject; applied again they are the checkout's tree."""
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "ggml : start one twice\n\nbecause")
    commit(project.clone, {"ggml/ops.c": "// ops\n", "ggml/new.c": "n\n"}, "ops: new (v2)!")
    patches = export(project).patches
    assert list(project.files("mine")) == ["ggml-start-one-twice.patch", "ops-new-v2.patch", "series"]
    assert [patch.name for patch in patches] == ["ggml-start-one-twice.patch", "ops-new-v2.patch"]
    assert b"Ann Author" in patches[0].content
    assert project.apply("mine").tree == git(project.clone, "rev-parse", "HEAD^{tree}")
    assert series.check(project.root, "mine", project.cache, project.pin) == {}


def test_beside_the_patches_for_another_pin(project: Project) -> None:
    """A checkout on another pin gives patches for that pin, by the names that the series has, with its overlays."""
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "ggml : start one twice")
    write(project.root, {"kernels/k.cu": "// k\n"})
    export(project)
    (project.root / "patches/mine/series").write_text("overlay kernels/k.cu ggml/k.cu\nggml-start-one-twice.patch\n")
    before = project.files("mine")
    later = project.new_pin({"ggml/ggml.c": twice("two")})
    git(project.clone, "checkout", "--quiet", later)
    commit(project.clone, {"ggml/ggml.c": twice("one", twice("two"))}, "ggml : start one twice")
    beside = series.export(project.root, "mine", project.cache, later, project.clone, beside=True)
    assert [patch.name for patch in beside.patches] == ["ggml-start-one-twice.patch"]
    assert [overlay.dest for overlay in beside.overlays] == ["ggml/k.cu"]
    assert project.files("mine") == before
    for pin in (project.pin, later):
        assert series.check(project.root, "mine", project.cache, pin) == {}


def test_what_is_not_committed(project: Project) -> None:
    """Edits and new files become one more patch, by the user, with the message that must then be given."""
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "first")
    write(project.clone, {"ggml/ggml.c": twice("two", twice("one")), "ggml/new.c": "n\n", "build/x": "x\n"})
    with pytest.raises(SpecError, match="not committed") as caught:
        export(project)
    assert "--message" in caught.value.next
    assert not (project.root / "patches/mine").exists()
    patches = export(project, message="ggml : the rest\n\nand why").patches
    assert [patch.name for patch in patches] == ["first.patch", "ggml-the-rest.patch"]
    assert b"From: Me Myself <me@example.com>" in patches[1].content
    assert b"\n\nand why\n\ndiff" in patches[1].content
    assert project.apply("mine").tree == series.apply_tree(project.cache, project.pin, project.clone).tree


def test_checkout_is_left_alone(project: Project) -> None:
    """Exporting changes nothing in the checkout, and leaves nothing of it in the cache but files."""
    commit_id = commit(project.clone, {"ggml/ggml.c": twice("one")}, "first")
    write(project.clone, {"ggml/new.c": "n\n"})
    before = state(project.clone)
    export(project, message="rest")
    assert state(project.clone) == before
    assert project.cache.git.attempt("cat-file", "-e", commit_id).rc != 0


def test_again(project: Project) -> None:
    """Exporting the same commits again changes no byte; what the series gives can be exported to the same series."""
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "[x] größer\n\n body\n---\nkept?", {"GIT_AUTHOR_NAME": "Jörg"})
    commit(project.clone, {"ggml/ops.c": "o\n"}, "word " * 40)
    first = export(project)
    assert b"\n---\nkept?\n\ndiff --git" in first.patches[0].content
    assert export(project) == first
    check_out(project, project.apply("mine").commit)
    assert export(project) == first


def test_file_names_stay(project: Project) -> None:
    """A patch keeps the name its subject had; new ones are added, dropped ones removed, comments stay."""
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "first")
    commit(project.clone, {"ggml/ops.c": "o\n"}, "second")
    export(project)
    folder = project.root / "patches/mine"
    (folder / "first.patch").rename(folder / "hooks.patch")
    text = "# what this is\n\n# the hooks\nhooks.patch\n# the rest\nsecond.patch\n"
    write(folder, {"series": text, "README.md": "r\n"})
    git(project.clone, "reset", "--quiet", "--hard", "HEAD~1")
    commit(project.clone, {"README.md": "x\n"}, "third")
    commit(project.clone, {"README.md": "y\n"}, "third")
    in_git(folder / "second.patch")
    export(project)
    files = project.files("mine")
    assert list(files) == ["README.md", "hooks.patch", "series", "third-2.patch", "third.patch"]
    assert files["series"] == b"# what this is\n\n# the hooks\nhooks.patch\nthird.patch\nthird-2.patch\n"


def test_a_patch_that_git_lacks_is_not_removed(project: Project) -> None:
    write(project.clone, {"ggml/ggml.c": twice("one")})
    export(project, message="first")
    before, path = project.files("mine"), project.root / "patches/mine/first.patch"
    with pytest.raises(SpecError, match="git does not have it") as caught:
        export(project, message="again")
    assert caught.value.next == f"git add {path}, or rm {path}"
    assert project.files("mine") == before
    in_git(path)
    assert [patch.name for patch in export(project, message="again").patches] == ["again.patch"]
    assert not path.exists()


def test_overlays_go_home(project: Project) -> None:
    """An overlay's new content goes to kernels/, and no patch mentions it; a commit of overlays alone is no patch."""
    write(project.root, {"kernels/k.cuh": "// one\n", "kernels/l.cuh": "// l\n"})
    project.series("mine", {}, "# kernel", "overlay kernels/k.cuh ggml/k.cuh", "overlay kernels/l.cuh ggml/l.cuh")
    check_out(project, project.apply("mine").commit)
    commit(project.clone, {"ggml/ggml.c": twice("one"), "ggml/k.cuh": "// two\n"}, "hook it in")
    write(project.clone, {"ggml/k.cuh": "// three\n"})
    (patch,) = export(project).patches
    assert [path.read_text() for path in sorted(project.root.glob("kernels/*"))] == ["// three\n", "// l\n"]
    assert (patch.name, patch.paths) == ("hook-it-in.patch", {"ggml/ggml.c"})
    assert project.files("mine")["series"].decode().splitlines() == [
        *("# kernel", "overlay kernels/k.cuh ggml/k.cuh", "overlay kernels/l.cuh ggml/l.cuh"),
        "hook-it-in.patch",
    ]
    assert project.apply("mine").tree == series.apply_tree(project.cache, project.pin, project.clone).tree


def test_overlay_that_is_not_there(project: Project) -> None:
    write(project.root, {"kernels/k.cuh": "// one\n", "kernels/l.cuh": "// l\n"})
    project.series("mine", {}, "overlay kernels/k.cuh ggml/k.cuh", "overlay kernels/l.cuh ggml/l.cuh")
    (project.clone / "ggml/l.cuh").symlink_to(project.root / "kernels/l.cuh")
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "hook it in")
    overlays = [(overlay.dest, overlay.content) for overlay in export(project).overlays]
    assert overlays == [("ggml/k.cuh", b"// one\n"), ("ggml/l.cuh", b"// l\n")]


@pytest.mark.parametrize(
    "line", ["overlay ../outside ggml/k.cuh", "overlay kernels/link ggml/k.cuh", "overlay kernels/../x ggml/k"]
)
def test_overlay_that_leads_out(line: str, project: Project, tmp_path: Path) -> None:
    write(tmp_path, {"outside": "mine\n", "project/kernels/x": "x\n", "project/x": "x\n"})
    (project.root / "kernels/link").symlink_to(tmp_path / "outside")
    project.series("mine", {}, line)
    commit(project.clone, {"ggml/k.cuh": "evil\n", "ggml/k": "evil\n"})
    with pytest.raises(SpecError, match="series mine: overlay"):
        export(project)
    assert [(tmp_path / path).read_text() for path in ("outside", "project/x")] == ["mine\n", "x\n"]


def test_line_that_leads_out(project: Project, tmp_path: Path) -> None:
    """A patch that is no longer part of the series is removed from its folder, and no file elsewhere."""
    write(tmp_path, {"mine.patch": "mine\n"})
    project.series("mine", {}, "../../../mine.patch")
    commit(project.clone, {"ggml/ggml.c": twice("one")}, "first")
    export(project)
    assert (tmp_path / "mine.patch").read_text() == "mine\n"
    assert project.files("mine")["series"] == b"first.patch\n"


def test_refused(project: Project, tmp_path: Path) -> None:
    """What cannot be a series is refused before a byte is written."""

    def refuses(problem: str, name: str = "mine", message: str = "") -> None:
        with pytest.raises(SpecError, match=problem):
            export(project, name, message)

    refuses("nothing to export")
    refuses("no name", "../x")
    (project.clone / "link").symlink_to("README.md")
    refuses(r"x\.patch cannot be a patch of a series, line \d+: mode 120000", message="x")
    (project.clone / "link").unlink()
    write(project.clone, {"ggml/x.bin": b"\0\1"})
    refuses("binary patches are refused", message="x")
    (project.clone / "ggml/x.bin").unlink()
    git(project.clone, "checkout", "--quiet", "-b", "side")
    commit(project.clone, {"ggml/a": "a\n"})
    git(project.clone, "checkout", "--quiet", "main")
    commit(project.clone, {"ggml/b": "b\n"})
    git(project.clone, "merge", "--quiet", "-m", "merge", "side")
    refuses("has merges over pin")
    (tmp_path / "elsewhere").mkdir()
    (project.root / "patches/linked").symlink_to(tmp_path / "elsewhere")
    refuses("is a symbolic link", "linked")
    assert list((project.root / "patches").iterdir()) == [project.root / "patches/linked"]
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_no_author(project: Project) -> None:
    write(Path.home(), {".gitconfig": "[user]\n useConfigOnly = true\n"})
    write(project.clone, {"ggml/a": "a\n"})
    with pytest.raises(SpecError, match="no author") as caught:
        export(project, message="x")
    assert caught.value.next.startswith("git config --global user.email ")


def test_shallow_checkout(project: Project, tmp_path: Path) -> None:
    """A shallow clone at the pin, as `git clone --depth 1` makes it, is enough."""
    where = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth=1", project.clone.as_uri(), str(where))
    commit(where, {"ggml/ops.c": function("add") + twice("mul", function("mul"))}, "mul")
    (patch,) = series.export(project.root, "mine", project.cache, project.pin, where).patches
    assert patch.name == "mul.patch"
    subprocess.run(["git", "-C", str(where), "fsck"], check=True, capture_output=True)
