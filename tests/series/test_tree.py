"""A dirty checkout as a source: what is on the disk counts, and nothing on the disk changes."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from dgxlab import series
from dgxlab.errors import SpecError
from dgxlab.model import Source
from tests.machines import script
from tests.repos import commit, git, upstream, write
from tests.series.conftest import Project, twice


def apply_tree(project: Project, checkout: Path | None = None) -> Source:
    return series.apply_tree(project.cache, project.pin, checkout or project.clone)


def state(checkout: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return mode, time and content of every file, git's own included."""
    files = [path for path in sorted(checkout.rglob("*")) if path.is_file() or path.is_symlink()]
    return {
        str(path): (path.lstat().st_mode, path.lstat().st_mtime_ns, b"" if path.is_symlink() else path.read_bytes())
        for path in files
    }


def names(project: Project, source: Source) -> set[str]:
    return set(project.cache.git.run("ls-tree", "-r", "--name-only", source.commit).splitlines())


def test_clean(project: Project) -> None:
    tree = git(project.clone, "rev-parse", "HEAD^{tree}")
    assert apply_tree(project) == Source(project.pin, tree, project.pin, series=(), dirty=True)


def test_everything_on_the_disk_counts(project: Project) -> None:
    """Commits, staged and unstaged edits, new, removed, renamed and executable files all count; ignored ones do not."""
    commit(project.clone, {"ggml/committed.c": "c\n"})
    write(project.clone, {"ggml/staged.c": "s\n", "ggml/forced.o": "o\n"})
    git(project.clone, "add", "--force", "ggml/staged.c", "ggml/forced.o")
    write(project.clone, {"ggml/ggml.c": twice("two"), "ggml/new file.c": "n\n", "build/x.c": "b\n", "ggml/y.o": "y\n"})
    (project.clone / "ggml/ops.c").rename(project.clone / "ggml/moved.c")
    (project.clone / "CMakeLists.txt").chmod(0o755)
    source = apply_tree(project)
    assert names(project, source) == {
        *(".gitignore", "CMakeLists.txt", "README.md", "ggml/ggml.c", "ggml/committed.c"),
        *("ggml/staged.c", "ggml/forced.o", "ggml/new file.c", "ggml/moved.c"),
    }
    assert project.content(source, "ggml/ggml.c") == twice("two")
    assert project.cache.git.run("ls-tree", source.commit, "CMakeLists.txt").startswith("100755")
    git(project.clone, "add", "--all")
    assert source.tree == git(project.clone, "write-tree")
    assert (source.dirty, source.series, source.pin) == (True, (), project.pin)
    assert project.cache.git.run("rev-parse", f"{source.commit}^") == project.pin


def test_nothing_is_touched(project: Project) -> None:
    """The checkout has the same bytes and times afterwards, its index, HEAD and objects included."""
    write(project.clone, {"ggml/ggml.c": "edit\n", "ggml/new.c": "n\n"})
    git(project.clone, "add", "ggml/new.c")
    os.utime(project.clone / "README.md")  # what makes git want to refresh its index
    before = state(project.clone)
    apply_tree(project)
    apply_tree(project)
    assert state(project.clone) == before


@pytest.mark.parametrize("pin", ["in the checkout", "promised by a remote"])
def test_nothing_that_it_names_is_run(pin: str, project: Project, tmp_path: Path) -> None:
    """Its configuration, hooks and attributes may name programs for every step; none of them is started."""
    program = script(tmp_path / "program", f"#!/bin/sh\necho $0 $@ >>{tmp_path}/ran\nexit 1\n")
    write(project.clone, {".gitattributes": "* filter=evil diff=evil merge=evil\n", "ggml/new.c": "n\n"})
    core = ("fsmonitor", "sshCommand", "pager", "editor", "alternateRefsCommand")
    keys = (*(f"core.{name}" for name in core), "gpg.program")
    drivers = ("filter.evil.clean", "filter.evil.process", "diff.evil.textconv", "diff.evil.command", "diff.external")
    settings = {"log.showSignature": "true", "user.name": "Ann", "user.email": "ann@example.com"}
    remote = {"url": str(project.clone), "promisor": "true", "uploadpack": str(program)}
    settings |= {f"remote.evil.{key}": value for key, value in remote.items()}
    settings |= {"core.repositoryformatversion": "1", "extensions.partialClone": "evil"}
    settings |= dict.fromkeys((*keys, *drivers, "credential.helper", "uploadpack.packObjectsHook"), str(program))
    for key, value in settings.items():
        git(project.clone, "config", key, value)
    for hook in ("post-index-change", "fsmonitor-watchman", "post-checkout", "pre-commit", "reference-transaction"):
        (project.clone / ".git" / "hooks").mkdir(exist_ok=True)
        (project.clone / ".git" / "hooks" / hook).symlink_to(program)
    if pin == "in the checkout":
        assert "ggml/new.c" in names(project, apply_tree(project))
        series.export(tmp_path, "mine", project.cache, project.pin, project.clone, "a message")
    else:
        (project.clone / ".git" / "objects" / project.pin[:2] / project.pin[2:]).unlink()
        with pytest.raises(SpecError, match="not based on"):
            apply_tree(project)
    assert not (tmp_path / "ran").exists(), (tmp_path / "ran").read_text()


def test_edit_and_again(project: Project) -> None:
    """Each look sees the disk as it is: edits, a file that becomes a folder, files gone, new ignore rules."""
    write(project.clone, {"ggml/a": "1\n", "notes.txt": "n\n"})
    first = apply_tree(project)
    write(project.clone, {"ggml/a": "2\n"})
    second = apply_tree(project)
    assert [project.content(source, "ggml/a") for source in (first, second)] == ["1\n", "2\n"]
    write(project.clone, {"ggml/a": None})
    write(project.clone, {"ggml/a/b": "3\n", ".gitignore": "notes.txt\n"})
    third = apply_tree(project)
    assert {"ggml/a/b"} == {name for name in names(project, third) if name.startswith("ggml/a")}
    assert "notes.txt" in names(project, second) - names(project, third)
    project.back()
    write(project.clone, {"ggml/a": "1\n", "notes.txt": "n\n"})
    assert apply_tree(project) == first


def test_changes_that_git_was_told_to_overlook(project: Project) -> None:
    """And what is staged or committed, whose content the checkout's own index has."""
    before = apply_tree(project).tree
    git(project.clone, "update-index", "--assume-unchanged", "README.md")
    (project.clone / "README.md").write_text("other\n")
    overlooked = apply_tree(project).tree
    assert overlooked != before
    git(project.clone, "update-index", "--no-assume-unchanged", "README.md")
    assert apply_tree(project).tree == overlooked
    git(project.clone, "add", "README.md")
    assert apply_tree(project).tree == overlooked
    git(project.clone, "commit", "-q", "-m", "other")
    assert apply_tree(project).tree == overlooked
    git(project.clone, "rm", "-q", "README.md")
    assert "README.md" not in names(project, apply_tree(project))


def test_private_ignore_rules(project: Project) -> None:
    write(project.clone, {".git/info/exclude": "private/\n", "private/x": "x\n", "a.swp": "s\n"})
    write(Path.home(), {".config/git/ignore": "*.swp\n"})
    assert apply_tree(project).commit == project.pin


def test_line_endings_of_the_user_do_not_count(project: Project) -> None:
    write(Path.home(), {".gitconfig": "[core]\n autocrlf = input\n"})
    write(project.clone, {"ggml/a": "1\r\n"})
    assert project.cache.git.read("cat-file", "blob", f"{apply_tree(project).commit}:ggml/a") == b"1\r\n"


def test_worktree(project: Project, tmp_path: Path) -> None:
    where = tmp_path / "worktree"
    git(project.clone, "worktree", "add", "--quiet", "--detach", str(where))
    write(where, {"ggml/a": "1\n"})
    assert "ggml/a" in names(project, apply_tree(project, where))


def test_not_a_checkout(project: Project, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    stranger = tmp_path / "stranger"
    upstream(stranger, {"setup.py": "x\n"})
    clone = "git clone https://github.com/ggml-org/llama.cpp"
    for checkout, cause, mend in (
        (tmp_path / "empty", "is not a git checkout: not a git repository", clone),
        (tmp_path / "gone", "is not a git checkout: there is no such folder", f"{clone} {tmp_path}/gone"),
        (project.clone / "ggml", "is inside the checkout", f"ls {project.clone}"),
        (stranger, r"is not llama\.cpp: it has no CMakeLists\.txt", clone),
        (project.clone / "README.md", "is not a git checkout: it is no folder", clone),
    ):
        with pytest.raises(SpecError, match=cause) as refused:
            apply_tree(project, checkout)
        assert refused.value.next == mend


def test_based_on_something_else(project: Project) -> None:
    other = project.new_pin({"README.md": "2\n"})
    write(project.clone, {"ggml/a": "1\n"})
    with pytest.raises(SpecError, match=f"based on pin {other[:12]}") as caught:
        series.apply_tree(project.cache, other, project.clone)
    assert "set llama_cpp.pin" in caught.value.next
    with pytest.raises(SpecError, match="in the cache"):
        series.apply_tree(project.cache, "a" * 40, project.clone)


def test_a_checkout_without_a_commit(project: Project) -> None:
    write(project.clone, {"ggml/a": "1\n"})
    git(project.clone, "checkout", "--quiet", "--orphan", "none")
    with pytest.raises(SpecError) as caught:
        apply_tree(project)
    pin = project.pin[:12]
    assert caught.value.message == f"{project.clone} has no commit, so it is not based on pin {pin}"
    words, _, about = caught.value.next.partition(", which keeps its files")
    assert about == ", once it has that commit"
    subprocess.run(shlex.split(words), check=True, capture_output=True)
    assert "ggml/a" in names(project, apply_tree(project))


def test_what_no_tree_can_carry(project: Project, tmp_path: Path) -> None:
    """A nested repository, a submodule and a link out of the tree are named instead of left out."""
    upstream(project.clone / "vendored")
    with pytest.raises(SpecError, match="vendored is a"):
        apply_tree(project)
    git(project.clone, "add", "vendored")
    with pytest.raises(SpecError, match="a submodule"):
        apply_tree(project)
    subprocess.run(["rm", "-rf", str(project.clone / "vendored")], check=True)
    project.back()
    (project.clone / "ggml/inside.c").symlink_to("ggml.c")
    assert "ggml/inside.c" in names(project, apply_tree(project))
    for target in (str(tmp_path / "kernel.cuh"), "../../kernel.cuh"):
        (project.clone / "ggml/kernel.cuh").unlink(missing_ok=True)
        (project.clone / "ggml/kernel.cuh").symlink_to(target)
        with pytest.raises(SpecError, match=r"ggml/kernel\.cuh links out"):
            apply_tree(project)


def test_every_changed_line_counts(project: Project) -> None:
    """Also one that looks like a header: `--` of SQL or Lua that is removed, `++` that is added; and in a new file."""
    pin = project.new_pin({"ggml/ops.c": "-- one\n++ two\nthree\n"})
    git(project.clone, "checkout", "--quiet", pin)
    write(
        project.clone, {"ggml/ops.c": "++ 1\r+ new\n-- 2\nthree\n", "ggml/new.c": "++ 3\n", "ggml/x.bin": "\0\n-\n+\n"}
    )
    assert series.changed_lines(series.diff(project.cache, series.apply_tree(project.cache, pin, project.clone))) == 5
