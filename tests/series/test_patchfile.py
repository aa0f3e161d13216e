"""Patch files as real git writes them are read exactly; anything else is refused."""

import re

import pytest

from dgxlab.series.patchfile import NO_BLOB, Patch, PatchSyntaxError
from tests.repos import FORMAT, GGML_C, git, patch_text, write
from tests.series.conftest import Project, twice


def test_what_a_patch_says(project: Project) -> None:
    files = {"ggml/ggml.c": twice("one", twice("four")), "ggml/new.c": "x\n", "ggml/ops.c": None}
    patch = Patch.parse("p.patch", project.patch(files))

    def blob(revision: str) -> str:
        return git(project.clone, "rev-parse", revision)

    assert [(c.old_path, c.new_path, c.old_blob, c.new_blob) for c in patch.changes] == [
        ("ggml/ggml.c", "ggml/ggml.c", blob("HEAD~1:ggml/ggml.c"), blob("HEAD:ggml/ggml.c")),
        ("", "ggml/new.c", NO_BLOB, blob("HEAD:ggml/new.c")),
        ("ggml/ops.c", "", blob("HEAD~1:ggml/ops.c"), NO_BLOB),
    ]
    assert patch.paths == {"ggml/ggml.c", "ggml/new.c", "ggml/ops.c"}
    assert patch.diff == patch.content[patch.content.index(b"diff --git") :]


AWKWARD = {
    "lines that look like a diff": {"ggml/x": "-- a/y\n++ b/y\n@@ -1 +1 @@\ndiff --git a/y b/y\n-- \nFrom \n"},
    "no newline at the end": {"ggml/ggml.c": GGML_C.removesuffix("\n") + "end"},
    "carriage returns": {"ggml/ggml.c": GGML_C.replace("\n", "\r\n"), "ggml/x": "a\rb\r\n"},
    "no UTF-8": {"ggml/x": b"\xff\xfe latin \xe4\n"},
    "an empty file": {"ggml/x": ""},
    "an empty file removed": {"ggml/empty": None},
    "spaces in a name": {"ggml/a name with spaces.c": "x\n", "README.md": "y\n"},
    "a rename": {"ggml/ops.c": None, "ggml/src/ops.c": "".join(GGML_C)},
    "form feeds": {"ggml/x": "a\fb\vc\x1cd\x85e\u2028f\n"},
    "everything removed": {"ggml/ops.c": None, "ggml/empty": None, "README.md": None},
}


@pytest.mark.parametrize("kind", AWKWARD)
def test_awkward_patches_round_trip(kind: str, project: Project) -> None:
    start = project.new_pin({"ggml/empty": "", "ggml/ops.c": GGML_C})
    git(project.clone, "reset", "--quiet", "--hard", start)
    project.series("awkward", {"awkward.patch": project.patch(AWKWARD[kind])})
    source = project.apply("awkward", pin=start)
    assert source.tree == git(project.clone, "rev-parse", "HEAD^{tree}")
    again = project.cache.git.read("format-patch", "-1", "--stdout", *FORMAT, source.commit)
    assert again == project.read("awkward").patches[0].content


def test_mode_change(project: Project) -> None:
    """A file that becomes executable needs no blob id; its content is what the pin has."""
    (project.clone / "README.md").chmod(0o755)
    project.series("mode", {"mode.patch": project.patch({})})
    source = project.apply("mode")
    assert project.cache.git.run("ls-tree", source.commit, "README.md").startswith("100755 blob")


MESSAGES = {
    "author and subject that need encoding": ("cuda : größer als 名前", {"GIT_AUTHOR_NAME": "Jörg Ünlü 名"}),
    "a comma in the name": ("x", {"GIT_AUTHOR_NAME": "Doe, Jane (she)"}),
    "a subject of many words": ("word " * 60, {}),
    "brackets": ("[cuda] faster", {}),
    "a long body": ("x\n\nfirst\n\n  indented\n\nlast: line\nSigned-off-by: A <a@b>\n", {}),
    "a body like mail": ("x\n\n> quoted\n>From here\n", {}),
    "another zone": ("x", {"GIT_AUTHOR_DATE": "1600000000 -1130"}),
}


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_survive(kind: str, project: Project) -> None:
    message, author = MESSAGES[kind]
    content = project.patch({"ggml/x": "x\n"}, message, **author)
    project.series("message", {"message.patch": content})
    source = project.apply("message")
    shape = "--format=%an|%ae|%ad|%B"
    wanted = git(project.clone, "show", "--no-patch", "--date=raw", shape).rstrip()
    assert project.cache.git.run("show", "--no-patch", "--date=raw", shape, source.commit).rstrip() == wanted


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (b"From 0000", b"Form 0000", "line 1: a patch file starts with `From `"),
        (b"\ndiff --git a/ggml/x", b"\ndiff -git a/ggml/x", "unexpected 'diff -git a/ggml/x"),
        (b"..", b".", "unexpected 'index"),
        (b"ggml/x", b"../x", "'../x' is no plain path"),
        (b"ggml/x", b"/etc/x", "'/etc/x' is no plain path"),
        (b"ggml/x", b".git/hooks/x", "'.git/hooks/x' is no plain path"),
        (b"ggml/x", b"ggml/.GIT /x", "is no plain path"),
        (b"ggml/x", b"ggml//x", "is no plain path"),
        (b"ggml/x", b"ggml/ggml.c", "ggml/ggml.c is there twice"),
        (b"a/ggml/x", b'"a/ggml/\\303"', "need quoting"),
        (b"+++ b/ggml/x", b"+++ b/CMakeLists.txt", "its paths do not agree"),
        (b"@@ -3,2", b"@@ -3,9", "the hunk is shorter than its header says"),
        (b"@@ -3,2 +3,3", b"@@ -3,2 +3,2", "the hunk does not fit its header"),
        (b"@@ -3", b"@@ 3", "a damaged hunk header"),
        (b"--- a/ggml/ggml.c\n+++ b/ggml/ggml.c\n", b"", "hunks without `---` and `+++` lines"),
        (b"+++ b/ggml/ggml.c\n", b"", "unexpected '--- a/ggml/ggml.c"),
        (b"\n@@", b"\nBinary files differ\n@@", "binary patches are refused"),
        (NO_BLOB.encode(), b"1" * 40, "the blob ids do not agree with a new or removed file"),
    ],
)
def test_refused(old: bytes, new: bytes, problem: str, project: Project) -> None:
    content = project.patch({"ggml/ggml.c": twice("one"), "ggml/x": "a\n"})
    assert old in content
    with pytest.raises(PatchSyntaxError, match=re.escape(problem)):
        Patch.parse("p.patch", content.replace(old, new))


def test_without_blob_ids(project: Project) -> None:
    project.patch({"ggml/ggml.c": twice("one")})
    short = git(project.clone, "format-patch", "-1", "--stdout").encode()
    for content in (short, re.sub(rb"\nindex .*", b"", short)):
        with pytest.raises(PatchSyntaxError, match="git format-patch --full-index"):
            Patch.parse("p.patch", content)


def test_real_binaries_and_links(project: Project) -> None:
    with pytest.raises(PatchSyntaxError, match="binary patches"):
        Patch.parse("p.patch", project.patch({"ggml/x": b"\0\1\2"}))
    (project.clone / "link").symlink_to("/etc/passwd")
    with pytest.raises(PatchSyntaxError, match="mode 120000"):
        Patch.parse("p.patch", project.patch({}))
    head = git(project.clone, "rev-parse", "HEAD")
    git(project.clone, "update-index", "--add", "--cacheinfo", f"160000,{head},sub")
    git(project.clone, "commit", "--quiet", "-m", "sub")
    with pytest.raises(PatchSyntaxError, match="mode 160000"):
        Patch.parse("p.patch", patch_text(project.clone))


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"From x\n", b"\0" * 100, b"From " + b"\xff" * 50, b"diff --git a/x b/x\n"]
)
def test_garbage(content: bytes) -> None:
    with pytest.raises(PatchSyntaxError):
        Patch.parse("p.patch", content)


def test_signature_and_open_end(project: Project) -> None:
    """A signature, and a missing space in an empty context line, are read as git reads them."""
    write(project.clone, {"ggml/x": "a\n\nb\n"})
    project.patch({})
    content = project.patch({"ggml/x": "a\n\nB\n"})
    assert b"\n \n-b" in content
    assert len(Patch.parse("p.patch", content + b"-- \n2.39.5\n\n").changes) == 1
    assert len(Patch.parse("p.patch", content.replace(b"\n \n-b", b"\n\n-b")).changes) == 1
