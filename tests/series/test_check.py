"""`check` lists what is wrong with a series on a pin."""

import pytest

from dgxlab import series
from tests.repos import function, git, write
from tests.series.conftest import Project, twice


def check(project: Project, name: str = "shout", pin: str = "") -> list[str]:
    return series.check(project.root, name, project.cache, pin or project.pin)


def test_files(shout: Project) -> None:
    write(shout.root, {"patches/shout/stray.patch": "x", "patches/shout/series": "shout.patch\ngone.patch\n"})
    assert [problem.split()[0] for problem in check(shout)] == ["gone.patch:", "stray.patch"]
    (problem,) = check(shout, "none")
    assert f"{shout.root}/patches/none/series" in problem


@pytest.mark.parametrize(
    "flags",
    [
        ["--stat", "-U1", "--zero-commit", "--no-signature"],
        ["-U3", "--zero-commit", "--no-signature", "--no-stat"],
        ["-U1", "--zero-commit", "--no-signature", "--no-stat", "--numbered"],
        ["-U1", "--no-signature", "--no-stat"],
        ["-U1", "--zero-commit", "--no-stat", "--signature=git"],
    ],
    ids=["stat", "context", "numbered", "commit id", "signature"],
)
def test_written_otherwise(flags: list[str], project: Project) -> None:
    """A patch with more context, a diffstat, a number or a commit id applies, but is not in the form that is stable."""
    project.patch({"ggml/ggml.c": twice("two")})
    project.patch({"ggml/ops.c": twice("mul", function("add") + function("mul"))})
    text = git(project.clone, "format-patch", "--stdout", "--full-index", *flags, "-1", "HEAD~1") + "\n"
    project.series("other", {"other.patch": text.encode()})
    (problem,) = check(project, "other")
    assert problem.startswith("other.patch is ")
    assert series.refresh(project.root, "other", project.cache, project.pin) == ["other.patch"]
    assert check(project, "other") == []


def test_what_a_merge_left_over(project: Project) -> None:
    text = project.patch({"ggml/ggml.c": twice("two"), "ggml/ggml.c.orig": "int whole_file;\n"})
    project.series("stale", {"stale.patch": text})
    assert check(project, "stale") == ["stale.patch adds ggml/ggml.c.orig, which a merge left over"]
