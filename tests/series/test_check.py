"""`check` lists what is wrong with a series on a pin."""

import pytest

from dgxlab import series
from tests.repos import function, git, write
from tests.series.conftest import Project, twice


def check(project: Project, name: str = "shout", pin: str = "") -> dict[str, str]:
    """Return each problem with what mends it."""
    return series.check(project.root, name, project.cache, pin or project.pin)


def test_files(shout: Project) -> None:
    write(shout.root, {"patches/shout/stray.patch": "x", "patches/shout/series": "shout.patch\ngone.patch\n"})
    assert check(shout) == {
        "gone.patch: there is no such file": "mend the files in patches/shout",
        "stray.patch is not in its series file: list it there or remove it": "mend the files in patches/shout",
    }
    (problem,) = check(shout, "none")
    assert problem == f"{shout.root}/patches has no series 'none'"


def test_a_patch_that_does_not_apply_is_one_problem(shout: Project) -> None:
    """What git says about it is no further one, and no refresh mends it."""
    path = shout.root / "patches/shout/shout.patch"
    path.write_bytes(path.read_bytes().replace(b"     start(i);\n+", b"     begin(i);\n+"))
    ((problem, mend),) = check(shout).items()
    assert problem.endswith("not even to what it was made on: patch failed: ggml/ggml.c:19")
    assert mend.endswith("dgxlab patch export shout --tree CHECKOUT")


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
    ((problem, mend),) = check(project, "other").items()
    assert problem.startswith("other.patch is ")
    assert mend == f"dgxlab patch refresh other --pin {project.pin}"
    assert series.refresh(project.root, "other", project.cache, project.pin) == ["other.patch"]
    assert check(project, "other") == {}


def test_what_a_merge_left_over(project: Project) -> None:
    text = project.patch({"ggml/ggml.c": twice("two"), "ggml/ggml.c.orig": "int whole_file;\n"})
    project.series("stale", {"stale.patch": text})
    ((problem, mend),) = check(project, "stale").items()
    assert problem == "stale.patch adds ggml/ggml.c.orig, which a merge left over"
    assert mend == "remove it in a checkout, then dgxlab patch export stale --tree CHECKOUT"
