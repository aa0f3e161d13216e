"""Packs, and the way a host takes them in: real git on both sides."""

import subprocess
from pathlib import Path

import pytest

from dgxlab import series
from dgxlab.errors import SpecError
from dgxlab.source import PinCache
from dgxlab.source.git import GitError
from tests.conftest import PROJECT
from tests.journals import PIN
from tests.repos import GGML_C, cache_of, commit, git, patch_text, upstream, write_series


def host(path: Path, pin: str) -> Path:
    """Make what a host has before the first pack: an empty repository that knows where history ends."""
    subprocess.run(["git", "init", "--quiet", "--bare", str(path)], check=True)
    (path / "shallow").write_text(f"{pin}\n")
    return path


def receive(path: Path, pack: bytes) -> None:
    git(path, "index-pack", "--stdin", "--fix-thin", input=pack)


@pytest.fixture
def cache(tmp_path: Path) -> PinCache:
    """A cache with a toy pin that has a history elsewhere, and a series on it."""
    where = tmp_path / "clone"
    upstream(where)
    pin = commit(where, {"big.txt": "".join(f"{n * n}\n" for n in range(20000))})
    commit(where, {"ggml/ggml.c": GGML_C.replace("void two", "void TWO")}, "ggml : shout")
    write_series(tmp_path, "shout", {"shout.patch": patch_text(where)})
    return cache_of(tmp_path / "cache", where, pin)


def test_pin_then_series(cache: PinCache, tmp_path: Path) -> None:
    """A host gets the pin once, and then a patched tree in a few hundred bytes; trees are the client's."""
    (pin,) = cache.pins()
    source = series.apply(cache, pin, [series.read(tmp_path, "shout")])
    there = host(tmp_path / "host", pin)
    whole = cache.pack([pin])[0]
    receive(there, whole)
    assert git(there, "rev-parse", f"{pin}^{{tree}}") == cache.git.run("rev-parse", f"{pin}^{{tree}}")
    thin = cache.pack([source.commit], [pin])[0]
    receive(there, thin)
    assert git(there, "rev-parse", f"{source.commit}^{{tree}}") == source.tree
    assert "void TWO" in git(there, "cat-file", "blob", f"{source.commit}:ggml/ggml.c")
    assert len(thin) < 1000 < len(whole)
    assert git(there, "rev-list", "--count", pin) == "1"
    git(there, "fsck", "--full", "--strict")


def test_unknown_have(cache: PinCache) -> None:
    (pin,) = cache.pins()
    assert len(cache.pack([pin], ["a" * 40])[0]) > 1000


def test_commit_that_is_not_here(cache: PinCache) -> None:
    with pytest.raises(GitError, match="git pack-objects failed"):
        cache.pack(["b" * 40])


def test_damaged_cache_is_told(cache: PinCache, tmp_path: Path) -> None:
    """Objects that the disk lost end the pack with an error, exit code 9, not with a short pack."""
    (pin,) = cache.pins()
    source = series.apply(cache, pin, [series.read(tmp_path, "shout")])
    blob = cache.git.run("rev-parse", f"{source.commit}:ggml/ggml.c")
    (cache.path / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(SpecError, match=r"git pack-objects failed .*unable to read|bad object|missing") as caught:
        cache.pack([source.commit], [pin])
    assert caught.value.exit_code == 9


@pytest.mark.llama
def test_real_pin_and_series(pin_cache: PinCache, tmp_path: Path) -> None:
    """The real pin travels in about 35 MB, the shipped series on it in a few kB."""
    source = series.apply(pin_cache, PIN, [series.read(PROJECT, "backend-ops-shapes")])
    there = host(tmp_path / "host", PIN)
    whole = pin_cache.pack([PIN])[0]
    receive(there, whole)
    thin = pin_cache.pack([source.commit], [PIN])[0]
    receive(there, thin)
    trees = [git(there, "rev-parse", f"{commit}^{{tree}}") for commit in (source.commit, PIN)]
    assert trees[0] == source.tree != trees[1]
    assert 30e6 < len(whole) < 40e6
    assert len(thin) < 10_000
