"""A pin is found by what people call the commit."""

from pathlib import Path

import pytest

from dgxlab.errors import HostError, SpecError
from dgxlab.source import PinCache, full_id
from tests.repos import commit, git, quiet, upstream


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: the first has a tag with a message and a branch of the same name, the second a plain tag."""
    where = tmp_path / "repository"
    upstream(where)
    git(where, "tag", "-a", "b1", "-m", "release")
    commit(where, {"ggml/ggml.c": "second\n"})
    git(where, "tag", "b2")
    git(where, "branch", "b1")
    commit(where, {"ggml/ggml.c": "third\n"})
    return where


@pytest.mark.parametrize("form", ["{}", "file://{}"])
@pytest.mark.parametrize(("name", "commit"), [("b1", "HEAD~2"), ("b2", "HEAD~1"), ("main", "HEAD")])
def test_tags_and_branches(cache: PinCache, repository: Path, form: str, name: str, commit: str) -> None:
    """A tag object is not the commit that it names; a tag goes before a branch; a source without names is passed."""
    found = full_id(name, ["pypi:llama-cpp-python==0.3.30", form.format(repository)], cache, quiet)
    assert found == git(repository, "rev-parse", f"{commit}^{{commit}}")


def test_beginnings_of_ids(cache: PinCache, repository: Path) -> None:
    """A clone knows every commit, a URL its tags and branches, the cache its pins."""
    first, second = (git(repository, "rev-parse", f"HEAD~{n}") for n in (2, 1))
    url = f"file://{repository}"
    assert full_id(second[:9], [url], cache, quiet) == second
    assert full_id(second, [], cache, quiet) == second
    git(repository, "update-ref", "-d", "refs/tags/b1")
    git(repository, "update-ref", "-d", "refs/heads/b1")
    assert full_id(first[:9], [str(repository)], cache, quiet) == first
    with pytest.raises(SpecError) as refused:
        full_id(first[:9], [url], cache, quiet)
    assert refused.value.details == f"{url}: it has no tag or branch {first[:9]}"
    cache.ensure(first, [str(repository)], quiet)
    assert full_id(first[:9], [], cache, quiet) == first


def test_every_source_says_why_it_does_not_know_a_name(cache: PinCache, repository: Path, tmp_path: Path) -> None:
    sources = ["pypi:llama-cpp-python==0.3.30", str(repository), f"file://{tmp_path}/gone"]
    with pytest.raises(SpecError, match="no source has a tag, a branch or a commit '--b9'") as refused:
        full_id("--b9", sources, cache, quiet)
    package, clone, url = refused.value.details.splitlines()
    assert package.endswith("a package has one commit, and no names of commits")
    assert clone.endswith("the clone has no such tag, branch or commit")
    assert "gone" in url
    assert refused.value.next == f"git ls-remote --heads --tags {repository}"


def test_a_name_that_no_source_could_be_asked_for_may_exist(cache: PinCache, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/gone"
    with pytest.raises(HostError, match=r"'b9' could not be looked up: file://.*/gone: .*gone") as failed:
        full_id("b9", ["pypi:llama-cpp-python==0.3.30", url], cache, quiet)
    package, source, clone = failed.value.details.splitlines()
    assert package.startswith("pypi:")
    assert source.startswith(f"{url}: ")
    assert clone == "a clone here can be asked instead: dgxlab pin id b9 --source FOLDER"
    assert failed.value.next == f"git ls-remote --heads --tags {url}"
    with pytest.raises(SpecError, match="no source has a tag, a branch or a commit 'b9'"):
        full_id("b9", ["pypi:llama-cpp-python==0.3.30"], cache, quiet)


def test_the_command_that_lists_names_tells_no_password_and_works(cache: PinCache) -> None:
    with pytest.raises(HostError) as failed:
        full_id("b9", ["https://me:secret@127.0.0.1:9/llama.cpp"], cache, quiet)
    assert failed.value.next == "git ls-remote --heads --tags https://127.0.0.1:9/llama.cpp"
    assert "secret" not in failed.value.message + failed.value.details
