"""patches/ is read strictly, and every problem is named at once."""

from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.model import SeriesRef
from tests.repos import write
from tests.series.conftest import Project

KERNEL = "kernels/gemm/gemm.cuh"
OVERLAY = f"overlay {KERNEL} ggml/src/gemm.cuh"


@pytest.fixture
def gemm(shout: Project) -> Project:
    """The project with a kernel that the series overlays."""
    write(shout.root, {KERNEL: "// gemm\n"})
    text = (shout.root / "patches/shout/series").read_text()
    write(shout.root, {"patches/shout/series": f"# first\n{text}\n# the kernel\n{OVERLAY}\n"})
    return shout


def test_read(gemm: Project) -> None:
    read = gemm.read("shout")
    assert [patch.name for patch in read.patches] == ["shout.patch"]
    assert [(o.source, o.dest, o.content) for o in read.overlays] == [(KERNEL, "ggml/src/gemm.cuh", b"// gemm\n")]
    assert read.paths == {"ggml/ggml.c", "ggml/src/gemm.cuh"}
    assert read.ref == SeriesRef("shout", read.digest)
    assert len(read.digest) == 64


def test_some_patches(project: Project) -> None:
    """By number, with a digest of their own; a later one is merged where an earlier is left out."""
    texts = {name: project.patch({f"{name}.c": f"// {name}\n"}, name) for name in ("one", "two", "three")}
    project.back()
    project.series("three", {f"{name}.patch": text for name, text in texts.items()})
    first_and_last = project.read("three:1,3")
    assert [patch.name for patch in first_and_last.patches] == ["one.patch", "three.patch"]
    assert first_and_last.ref == SeriesRef("three:1,3", first_and_last.digest)
    assert project.read("three:1-3").digest == project.read("three").digest != first_and_last.digest
    source = project.apply("three:1,3")
    listed = project.cache.git.run("ls-tree", "--name-only", source.commit).split()
    assert {"one.c", "three.c"} <= set(listed)
    assert "two.c" not in listed
    for wrong in ("three:4", "three:0", "three:3-2", "three:1,2-9", "three:1-9999999999"):
        with pytest.raises(SpecError, match="has the patches 1 to 3"):
            project.read(wrong)


def test_digest_covers_what_reaches_the_tree(gemm: Project) -> None:
    """A byte of a patch, a byte of an overlay, the place of an overlay: each changes the digest; a comment does not."""
    path = gemm.root / "patches/shout/series"
    seen = {gemm.read("shout").digest}
    path.write_text("# other words\n" + path.read_text())
    assert gemm.read("shout").digest in seen
    write(gemm.root, {KERNEL: "// gemm \n"})
    seen.add(gemm.read("shout").digest)
    path.write_text(path.read_text().replace("ggml/src/gemm.cuh", "ggml/src/gemm.cu"))
    seen.add(gemm.read("shout").digest)
    patch = gemm.root / "patches/shout/shout.patch"
    patch.write_bytes(patch.read_bytes().replace(b"ggml : shout", b"ggml : SHOUT"))
    seen.add(gemm.read("shout").digest)
    assert len(seen) == 4


def test_digest_keeps_files_apart(project: Project) -> None:
    """Bytes that move from one patch to the next are another series, though all of them together are the same."""
    first, second = (project.patch({"ggml/ops.c": text}, f"ops : {text}") for text in ("1\n", "2\n"))
    project.series("a", {"a.patch": first, "b.patch": second})
    project.series("b", {"b.patch": second, "a.patch": first})
    assert project.read("a").digest != project.read("b").digest


def test_unknown_series(shout: Project) -> None:
    with pytest.raises(SpecError, match=r"patches has no series 'shuot'; there is 'shout'") as caught:
        shout.read("shuot")
    assert (caught.value.exit_code, caught.value.next) == (9, "dgxlab patch list")


@pytest.mark.parametrize("name", ["", ".", "..", "../shout", "a/b", "-x", "x" * 65, "a b", "ä"])
def test_names_of_series(name: str, shout: Project) -> None:
    """A name that could lead elsewhere is refused before the disk is looked at."""
    with pytest.raises(SpecError, match="is no name"):
        shout.read(name)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it lists nothing"),
        ("shout.patch\nshout.patch\n", "line 2: shout.patch is listed twice"),
        ("shout.patch -p1\n", "line 1: neither a patch file nor `overlay SRC DEST`: shout.patch -p1"),
        ("shout.patch\noverlay kernels/a\n", "line 2: neither a patch file"),
        ("shout.patch\nmissing.patch\n", "missing.patch: there is no such file"),
        ("shout.patch\n../shout/shout.patch\n", "../shout/shout.patch: a patch is a file NAME.patch"),
        ("shout.patch\nREADME.md\n", "README.md: a patch is a file NAME.patch"),
        ("shout.patch\n.hidden.patch\n", ".hidden.patch: a patch is a file NAME.patch"),
        ("shout.patch\n-x.patch\n", "-x.patch: a patch is a file NAME.patch"),
        (f"shout.patch\n{OVERLAY}\noverlay kernels/b ggml/src/gemm.cuh\n", "line 3: ggml/src/gemm.cuh is listed twice"),
        ("shout.patch\noverlay src/x.c ggml/x.c\n", "overlay src/x.c ggml/x.c: not a file of kernels/"),
        ("shout.patch\noverlay kernels/../hosts.yaml ggml/x\n", "not two plain relative paths"),
        ("shout.patch\noverlay /etc/passwd ggml/x\n", "not two plain relative paths"),
        ("shout.patch\noverlay kernels/none.cuh ggml/x\n", "kernels/none.cuh ggml/x: there is no such file"),
        ("shout.patch\noverlay kernels ggml/x\n", "overlay kernels ggml/x: not a file of kernels/"),
        (f"shout.patch\noverlay {KERNEL} ../x\n", "not two plain relative paths"),
        (f"shout.patch\noverlay {KERNEL} .git/config\n", "not two plain relative paths"),
        (f"shout.patch\noverlay {KERNEL} ggml/\n", "not two plain relative paths"),
        (f"shout.patch\noverlay {KERNEL} ggml/ggml.c\n", "shout.patch changes ggml/ggml.c, which is an overlay"),
        ("other.patch\n", "shout.patch is not in its series file"),
    ],
)
def test_series_file(text: str, problem: str, gemm: Project) -> None:
    write(gemm.root, {"patches/shout/series": text})
    with pytest.raises(SpecError) as caught:
        gemm.read("shout")
    assert problem in caught.value.details
    assert caught.value.message.startswith("series shout: ")


def test_every_problem_at_once(gemm: Project) -> None:
    write(gemm.root, {"patches/shout/series": "a.patch\nb.patch\n", "patches/shout/b.patch": "garbage"})
    with pytest.raises(SpecError, match=r"a\.patch: .* \(and 2 more\)") as caught:
        gemm.read("shout")
    assert len(caught.value.details.splitlines()) == 3


@pytest.mark.parametrize(
    "link", ["patches/shout/shout.patch", "patches/shout/series", "patches/shout", KERNEL, "kernels/gemm"]
)
def test_symbolic_links(link: str, gemm: Project, tmp_path: Path) -> None:
    """No part of a path may be a link: the bytes could come from anywhere."""
    path = gemm.root / link
    path.rename(tmp_path / "aside")
    path.symlink_to(tmp_path / "aside")
    with pytest.raises(SpecError, match="symbolic link"):
        gemm.read("shout")


def test_undecodable_and_huge(gemm: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgxlab.series.series._SIZE_LIMIT", 1000)
    write(gemm.root, {"patches/shout/shout.patch": b"x" * 1001})
    with pytest.raises(SpecError, match=r"shout\.patch: .* MB"):
        gemm.read("shout")
    write(gemm.root, {"patches/shout/series": b"\xff\xfe\n"})
    with pytest.raises(SpecError, match="codec can't decode"):
        gemm.read("shout")
