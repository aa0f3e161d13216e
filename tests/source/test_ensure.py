"""A pin is taken from whichever source has it, and from no other."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.source.cache import LOCK, PinCache, default_path, shown
from tests.repos import LLAMA, commit, git, quiet, upstream

CHILD = """
import sys
from pathlib import Path
from dgxlab.source import PinCache
PinCache(Path(sys.argv[1])).ensure(sys.argv[2], sys.argv[3:], lambda line: print(line, flush=True))
"""

FULL_DISK = """
import resource, sys
from pathlib import Path
from dgxlab.errors import DgxlabError
from dgxlab.source import PinCache
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    PinCache(Path(sys.argv[1])).ensure(sys.argv[2], sys.argv[3:], lambda line: None)
except DgxlabError as error:
    print(error.exit_code, error)
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of the toy with three commits; none but the last is the tip of anything."""
    where = tmp_path / "clone"
    upstream(where)
    commit(where, {"ggml/ggml.c": "second\n"})
    commit(where, {"ggml/ggml.c": "third\n"})
    return where


@pytest.fixture
def pin(clone: Path) -> str:
    """The middle commit."""
    return git(clone, "rev-parse", "HEAD~1")


@pytest.fixture
def cache(tmp_path: Path) -> PinCache:
    """A cache that does not exist yet."""
    return PinCache(tmp_path / "cache" / "llama.cpp.git")


@pytest.fixture
def daemon(clone: Path) -> Iterator[str]:
    """Serve the clone's folder over the git protocol on the loopback; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv = ["git", "daemon", "--listen=127.0.0.1", f"--port={port}", "--reuseaddr", "--export-all"]
    server = subprocess.Popen([*argv, f"--base-path={clone.parent}"], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_for(lambda: _listens(port))
        yield f"git://127.0.0.1:{port}/clone"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(condition: Callable[[], bool], limit_s: float = 20) -> None:
    until = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < until, "it never came"
        time.sleep(0.02)


def content(cache: PinCache, pin: str) -> str:
    """Return what the cache has in the file that every commit changes."""
    return cache.git.run("cat-file", "blob", f"{pin}:ggml/ggml.c")


@pytest.mark.parametrize("kind", ["clone", "bare", "shallow", "worktree", "submodule", "file URL", "~"])
def test_every_kind_of_clone(
    kind: str, clone: Path, pin: str, cache: PinCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that no ref points at comes out of any clone on this machine, alone, without its history."""
    monkeypatch.setenv("HOME", str(tmp_path))
    other = str(tmp_path / "other")
    sources = {"clone": str(clone), "file URL": clone.as_uri(), "~": "~/clone"}
    commands = {
        "bare": ["clone", "--quiet", "--bare", str(clone), other],
        "shallow": ["clone", "--quiet", "--depth=2", clone.as_uri(), other],
        "worktree": ["-C", str(clone), "worktree", "add", "--quiet", "--detach", other],
        "submodule": ["clone", "--quiet", f"--separate-git-dir={tmp_path / 'elsewhere'}", str(clone), other],
    }
    if kind in commands:
        git(tmp_path, *commands[kind])
    cache.ensure(pin, [sources.get(kind, other)], quiet)
    assert content(cache, pin) == "second"
    assert cache.pins() == [pin]
    assert cache.git.run("rev-list", "--count", pin) == "1"


def test_url_on_the_loopback(daemon: str, pin: str, cache: PinCache) -> None:
    """A real server gives the commit by its id and says how far it is, or that it has none."""
    lines: list[str] = []
    cache.ensure(pin, [daemon], lines.append)
    assert content(cache, pin) == "second"
    assert lines[0] == f"fetching {pin[:12]} from {daemon}"
    assert any(re.search(r"objects: +100%", line) for line in lines)
    with pytest.raises(SpecError, match="it has no commit dddddddddddd"):
        cache.ensure("d" * 40, [daemon], quiet)


def test_second_pin_beside_the_first(clone: Path, pin: str, cache: PinCache) -> None:
    """A child and its parent are both pins, each whole and each without history."""
    head = git(clone, "rev-parse", "HEAD")
    for commit_id in (head, pin):
        cache.ensure(commit_id, [str(clone)], quiet)
    assert sorted(cache.pins()) == sorted([head, pin])
    assert [cache.git.run("rev-list", "--count", c) for c in (head, pin)] == ["1", "1"]
    assert [content(cache, c) for c in (head, pin)] == ["third", "second"]


def test_first_source_that_has_it_wins(clone: Path, pin: str, cache: PinCache, tmp_path: Path) -> None:
    """Sources after the first that has the pin are not asked, and none is when it is here."""
    lines: list[str] = []
    cache.ensure(pin, [str(tmp_path / "nowhere"), str(clone), "pypi:nothing"], lines.append)
    assert content(cache, pin) == "second"
    asked = [line for line in lines if line.startswith("fetching")]
    assert asked == [f"fetching {pin[:12]} from {source}" for source in (tmp_path / "nowhere", clone)]
    lines.clear()
    cache.ensure(pin, [], lines.append)
    assert lines == []


def test_in_no_source(clone: Path, cache: PinCache, tmp_path: Path) -> None:
    """Every source is listed with its own cause, one line each."""
    empty = tmp_path / "empty"
    empty.mkdir()
    stranger = tmp_path / "stranger"
    upstream(stranger, {"setup.py": "pass\n"})
    wanted = "0123456789" * 4
    sources = [str(clone), str(empty), str(stranger), "http://127.0.0.1:9/llama.cpp", "llama.cpp", "pypi:llama"]
    with pytest.raises(SpecError, match=f"pin {wanted} cannot be taken from any of its 6 sources") as caught:
        cache.ensure(wanted, sources, quiet)
    lines = caught.value.details.splitlines()
    assert lines[0] == f"{clone}: it has no commit 012345678901"
    assert lines[1].startswith(f"{empty}: '{empty}' does not appear to be a git repository")
    assert lines[2] == f"{stranger}: it has no commit 012345678901"
    assert "127.0.0.1" in lines[3]
    assert "Failed to connect" in lines[3] or "Couldn't connect" in lines[3]
    assert lines[4] == "llama.cpp: neither a git URL, nor a folder or file on this machine, nor pypi:NAME==VERSION"
    assert lines[5] == "pypi:llama: not of the form pypi:NAME==VERSION"
    assert len(lines) == 6
    assert cache.pins() == []
    assert "clone on this machine" in caught.value.next


def test_commit_of_another_project(cache: PinCache, tmp_path: Path) -> None:
    """A commit that is not llama.cpp's is refused even though its id is right, and leaves no pin."""
    stranger = tmp_path / "stranger"
    pin = upstream(stranger, {"setup.py": "pass\n", "CMakeLists.txt": "\n"})
    with pytest.raises(SpecError, match=r"is not llama\.cpp: it has no ggml"):
        cache.ensure(pin, [str(stranger)], quiet)
    assert cache.pins() == []
    assert not cache.has(pin)
    assert cache.git.run("for-each-ref") == ""


def test_id_of_something_else(clone: Path, cache: PinCache) -> None:
    """The id of a file is no pin."""
    blob = git(clone, "rev-parse", "HEAD:ggml/ggml.c")
    with pytest.raises(SpecError, match="is a blob there, not a commit"):
        cache.ensure(blob, [str(clone)], quiet)
    assert not cache.has(blob)


@pytest.mark.parametrize("pin", ["", "master", "b4567", "e3a74b2", "E" * 40, "-" * 40, "a" * 41])
def test_not_a_commit_id(pin: str, cache: PinCache) -> None:
    """Branches, tags and shortened ids are refused before anything is asked."""
    with pytest.raises(SpecError, match="40 hex digits"):
        cache.ensure(pin, ["/nowhere"], quiet)
    assert not cache.path.exists()


def test_no_source_named(cache: PinCache) -> None:
    """Without a source the error says what to add."""
    with pytest.raises(SpecError, match="no source is named") as caught:
        cache.ensure("a" * 40, [], quiet)
    assert "llama_cpp.sources" in caught.value.next


@pytest.mark.parametrize(
    "source",
    [
        "--upload-pack=touch {}",
        "ext::sh -c touch% {}",
        "-oProxyCommand=touch {}@x:y",
        "ssh://-oProxyCommand=touch%20{}/x",
    ],
)
def test_source_that_is_a_command(source: str, cache: PinCache, tmp_path: Path) -> None:
    """A source cannot run anything."""
    trace = tmp_path / "was-here"
    with pytest.raises(SpecError):
        cache.ensure("a" * 40, [source.format(trace)], quiet)
    assert not trace.exists()


def test_passwords_are_not_shown(cache: PinCache) -> None:
    """A token in a URL is neither printed nor put into the error."""
    lines: list[str] = []
    with pytest.raises(SpecError) as caught:
        cache.ensure("a" * 40, ["http://me:s3cret@127.0.0.1:9/x"], lines.append)
    assert "s3cret" not in str(caught.value) + caught.value.details + "".join(lines)
    assert shown("https://example.com/x?private_token=s3cret") == "https://example.com/x?***"
    assert shown("git@github.com:ggml-org/llama.cpp") == "git@github.com:ggml-org/llama.cpp"


@pytest.mark.parametrize("damage", [b"", zlib.compress(b"blob 7\0forged\n")], ids=["lost", "forged"])
def test_damaged_clone(damage: bytes, clone: Path, pin: str, cache: PinCache) -> None:
    """A clone that lost an object, or has another in its place, gives no pin and does not stop the next source."""
    broken = clone.parent / "broken"
    shutil.copytree(clone, broken)
    blob = git(broken, "rev-parse", f"{pin}:ggml/ggml.c")
    path = broken / ".git" / "objects" / blob[:2] / blob[2:]
    path.unlink()
    if damage:
        path.write_bytes(damage)
    with pytest.raises(SpecError, match="cannot be taken from its only source"):
        cache.ensure(pin, [str(broken)], quiet)
    assert not cache.has(pin)
    cache.ensure(pin, [str(broken), str(clone)], quiet)
    assert content(cache, pin) == "second"


def test_what_a_killed_fetch_leaves(clone: Path, pin: str, cache: PinCache) -> None:
    """Lock files, half a pack and an unfinished ref of a fetch that was killed do not stop the next."""
    head = git(clone, "rev-parse", "HEAD")
    cache.ensure(head, [str(clone)], quiet)
    cache.git.run("update-ref", f"refs/dgxlab/incoming/{pin}", head)
    left = [
        cache.path / "shallow.lock",
        cache.path / "packed-refs.lock",
        cache.path / "objects" / "pack" / "tmp_pack_abc",
        cache.path / "refs" / "dgxlab" / "pins" / f"{pin}.lock",
        cache.path / "refs" / "dgxlab" / "incoming" / f"{pin}.lock",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    cache.ensure(pin, [str(clone)], quiet)
    assert content(cache, pin) == "second"
    assert [path for path in left if path.exists()] == []
    assert "incoming" not in cache.git.run("for-each-ref")


def test_killed_in_the_middle(clone: Path, pin: str, cache: PinCache) -> None:
    """A process that dies while a server keeps it waiting leaves no pin and no lock."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/x"
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(cache.path), pin, url], stdout=subprocess.PIPE, start_new_session=True
        )
        assert child.stdout is not None
        with child.stdout, silent.accept()[0]:
            child.kill()
            child.wait()
            assert not cache.has(pin)
            cache.ensure(pin, [str(clone)], quiet)
    assert content(cache, pin) == "second"


def test_processes_at_once(clone: Path, pin: str, cache: PinCache) -> None:
    """All that ask at the same moment get their pin; those that wait say so, and a pin is fetched once."""
    cache.path.mkdir(parents=True)
    wanted = [pin, pin, git(clone, "rev-parse", "HEAD")]
    with open(cache.path / LOCK, "w") as lock:
        flock(lock, LOCK_EX)
        children = [
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(cache.path), commit_id, str(clone)], stdout=subprocess.PIPE, text=True
            )
            for commit_id in wanted
        ]
        first_lines = [child.stdout.readline() for child in children if child.stdout]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert first_lines == ["waiting for another dgxlab that fetches a pin\n"] * 3
    assert sum("fetching" in output for output in outputs) == len(set(wanted))
    assert sorted(cache.pins()) == sorted(set(wanted))
    cache.git.run("fsck", "--full", "--strict")


def test_progress_of_a_silent_source(clone: Path, pin: str, cache: PinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing for too long is given up, with that cause."""
    monkeypatch.setattr("dgxlab.source.programs.select.select", _impatient)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(SpecError, match="no sign of life for 120 s"):
            cache.ensure(pin, [url], quiet)
    assert not cache.has(pin)


def _impatient(reading: list[int], writing: list[int], failing: list[int], limit_s: float) -> tuple[list[int], ...]:
    poll = select.poll()
    poll.register(reading[0], select.POLLIN)
    return ([fd for fd, _ in poll.poll(min(limit_s, 0.5) * 1000)], [], [])


def test_user_configuration_counts_for_fetching_only(
    clone: Path, pin: str, cache: PinCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewritten URLs work; hooks and housekeeping of the user's do not reach the cache."""
    hooks = clone.parent / "hooks"
    trace = clone.parent / "was-here"
    hooks.mkdir()
    (hooks / "reference-transaction").write_text(f"#!/bin/sh\ntouch {trace}\n")
    (hooks / "reference-transaction").chmod(0o755)
    (Path.home() / ".gitconfig").write_text(
        f'[url "{clone.as_uri()}"]\n insteadOf = https://llama.invalid/llama.cpp\n[core]\n hooksPath = {hooks}\n'
        "[fetch]\n prune = true\n[protocol]\n version = 0\n[transfer]\n fsckObjects = true\n"
    )
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    cache.ensure(pin, ["https://llama.invalid/llama.cpp"], quiet)
    assert content(cache, pin) == "second"
    assert not trace.exists()


def test_folder_of_something_else(clone: Path, pin: str, tmp_path: Path) -> None:
    """A folder that holds something else is never turned into a cache."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(SpecError, match="not empty and not dgxlab's cache"):
        PinCache(tmp_path / "mine").ensure(pin, [str(clone)], quiet)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
    with pytest.raises(SpecError, match="cannot be written: Not a directory"):
        PinCache(tmp_path / "mine" / "thesis.txt" / "cache").ensure(pin, [str(clone)], quiet)


@pytest.mark.parametrize("kind", ["clone", "archive"])
def test_full_disk(kind: str, cache: PinCache, tmp_path: Path) -> None:
    """A disk that takes no more is blamed on the disk, at once, with exit code 9 and nothing left behind."""
    clone = tmp_path / "large"
    pin = upstream(clone, {**LLAMA, "noise": os.urandom(300_000)})
    source = clone
    if kind == "archive":
        source = tmp_path / "toy.tar.gz"
        with tarfile.open(source, "w:gz") as tar:
            tar.add(clone / ".git", "toy-1/vendor/llama.cpp/.git")
    ran = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(cache.path), pin, str(source), str(clone)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout == f"9 {cache.path} cannot be written: File too large\n", ran.stderr
    assert not cache.has(pin)
    assert list((cache.path / "tmp").glob("*")) == []
    cache.ensure(pin, [str(source)], quiet)


def test_damaged_cache_heals(clone: Path, pin: str, cache: PinCache) -> None:
    """A cache whose repository was half removed is made whole again."""
    cache.ensure(pin, [str(clone)], quiet)
    (cache.path / "HEAD").unlink()
    assert not cache.has(pin)
    cache.ensure(pin, [str(clone)], quiet)
    assert content(cache, pin) == "second"


def test_default_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is where the user's caches are; a relative XDG_CACHE_HOME does not count."""
    assert default_path() == Path.home() / ".cache" / "dgxlab" / "llama.cpp.git"
    monkeypatch.setenv("XDG_CACHE_HOME", "/big/disk")
    assert default_path() == Path("/big/disk/dgxlab/llama.cpp.git")
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert default_path() == Path.home() / ".cache" / "dgxlab" / "llama.cpp.git"
