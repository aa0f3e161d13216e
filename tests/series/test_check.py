"""`check` says all that is wrong with a series on a pin, and nothing when all is well."""

from __future__ import annotations

import pytest

from dgxlab import series
from tests.repos import GGML_C, function, git, write
from tests.series.conftest import Project, twice


def check(project: Project, name: str = "shout", pin: str = "") -> list[str]:
    """Check a series of the project."""
    return series.check(project.root, name, project.cache, pin or project.pin)


def test_good(shout: Project) -> None:
    """A series as git wrote it is well, whoever has written it."""
    assert check(shout) == []


def test_files(shout: Project) -> None:
    """What is wrong with the files is listed line by line."""
    write(shout.root, {"patches/shout/stray.patch": "x", "patches/shout/series": "shout.patch\ngone.patch\n"})
    assert check(shout) == ["gone.patch: there is no such file", "stray.patch is not in its series file"]
    assert check(shout, "none") == [f"there is no {shout.root}/patches/none/series"]


def test_moved(shout: Project) -> None:
    """On a pin where a file moved, the patch, the file and the hunk are named."""
    moved = shout.new_pin({"ggml/ggml.c": function("zero") + GGML_C})
    problems = check(shout, pin=moved)
    assert problems[0].startswith(f"series shout: shout.patch does not apply to pin {moved[:12]}: ggml/ggml.c moved")


@pytest.mark.parametrize("how", ["stat", "context", "numbered", "commit id", "signature"])
def test_written_otherwise(how: str, project: Project) -> None:
    """A patch with more context, a diffstat, a number or a commit id applies, but is not the form that stays put."""
    project.patch({"ggml/ggml.c": twice("two")})
    project.patch({"ggml/ops.c": twice("mul", function("add") + function("mul"))})
    flags = {
        "stat": ["--stat", "-U1", "--zero-commit", "--no-signature"],
        "context": ["-U3", "--zero-commit", "--no-signature", "--no-stat"],
        "numbered": ["-U1", "--zero-commit", "--no-signature", "--no-stat", "--numbered"],
        "commit id": ["-U1", "--no-signature", "--no-stat"],
        "signature": ["-U1", "--zero-commit", "--no-stat", "--signature=git"],
    }[how]
    text = git(project.clone, "format-patch", "--stdout", "--full-index", *flags, "-1", "HEAD~1") + "\n"
    project.series("other", {"other.patch": text.encode()})
    (problem,) = check(project, "other")
    assert problem.startswith("other.patch, line ")
    assert problem.endswith("not as git format-patch writes it; dgxlab patch refresh mends it")
    done = series.refresh(project.root, "other", project.cache, project.pin)
    assert done.changed == ("other.patch",)
    assert check(project, "other") == []
