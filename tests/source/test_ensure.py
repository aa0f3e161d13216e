"""A pin is taken from whichever source has it, and from no other."""

import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from fcntl import LOCK_EX, flock
from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.source.cache import LOCK, PinCache, cache_path, without_secrets
from tests.agent.test_child import wait_until
from tests.machines import script
from tests.ports import kept_port
from tests.repos import LLAMA, commit, git, quiet, upstream

CHILD = """
import resource, sys
from pathlib import Path
from dgxlab.errors import DgxlabError
from dgxlab.source import PinCache
limit, cache, pin, *sources = sys.argv[1:]
if int(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
try:
    PinCache(Path(cache)).ensure(pin, sources, lambda line: print(line, flush=True))
except DgxlabError as error:
    print(error.exit_code, error)
"""


def ask(cache: PinCache, pin: str, *sources: str, limit: int = 0) -> subprocess.Popen[str]:
    """Start a process that wants a pin, and whose files may have so many bytes."""
    argv = [sys.executable, "-c", CHILD, str(limit), str(cache.path), pin, *sources]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, start_new_session=True)


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
    return git(clone, "rev-parse", "HEAD~1")


@pytest.fixture
def daemon(clone: Path) -> Iterator[str]:
    """Serve the clone's folder over the git protocol on the loopback; gives its URL."""
    probe, port = kept_port()
    argv = ["git", "daemon", "--listen=127.0.0.1", f"--port={port}", "--reuseaddr", "--export-all"]
    server = subprocess.Popen([*argv, f"--base-path={clone.parent}"], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        with socket.socket() as trial:
            wait_until(lambda: trial.connect_ex(("127.0.0.1", port)) == 0)
        yield f"git://127.0.0.1:{port}/clone"
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()
        probe.close()


def content(cache: PinCache, pin: str) -> str:
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
    with pytest.raises(SpecError, match="no commit dddddddddddd"):
        cache.ensure("d" * 40, [daemon], quiet)


def test_second_pin_beside_the_first(clone: Path, pin: str, cache: PinCache) -> None:
    head = git(clone, "rev-parse", "HEAD")
    for commit_id in (head, pin):
        cache.ensure(commit_id, [str(clone)], quiet)
    assert sorted(cache.pins()) == sorted([head, pin])
    assert [cache.git.run("rev-list", "--count", c) for c in (head, pin)] == ["1", "1"]
    assert [content(cache, c) for c in (head, pin)] == ["third", "second"]


def test_first_source_that_has_it_wins(clone: Path, pin: str, cache: PinCache, tmp_path: Path) -> None:
    lines: list[str] = []
    cache.ensure(pin, [str(tmp_path / "nowhere"), str(clone), "pypi:nothing"], lines.append)
    assert content(cache, pin) == "second"
    nowhere = tmp_path / "nowhere"
    first, why, second = lines[:3]
    assert [first, second] == [f"fetching {pin[:12]} from {source}" for source in (nowhere, clone)]
    assert why.startswith(f"{nowhere}: neither a git URL, ")
    lines.clear()
    cache.ensure(pin, [], lines.append)
    assert lines == []


def test_in_no_source(clone: Path, cache: PinCache, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    stranger = tmp_path / "stranger"
    upstream(stranger, {"setup.py": "pass\n"})
    wanted = "0123456789" * 4
    sources = [str(clone), str(empty), str(stranger), "http://127.0.0.1:9/llama.cpp", "llama.cpp", "pypi:llama"]
    with pytest.raises(SpecError, match=f"{wanted} .* 6 sources") as caught:
        cache.ensure(wanted, sources, quiet)
    causes = dict(line.split(": ", 1) for line in caught.value.details.splitlines())
    assert list(causes) == sources
    assert causes[str(clone)] == causes[str(stranger)]
    assert "no commit 012345678901" in causes[str(clone)]
    assert "a git repository" in causes[str(empty)]
    assert re.search(r"(Failed to|Couldn't) connect", causes[sources[3]])
    assert causes["llama.cpp"].startswith("neither a git URL")
    assert "pypi:NAME==VERSION" in causes["pypi:llama"]
    assert cache.pins() == []
    assert "llama_cpp.sources" in caught.value.next


def test_what_is_no_commit_of_llama(clone: Path, cache: PinCache, tmp_path: Path) -> None:
    """It is refused although its id is right, and leaves no pin."""
    stranger = tmp_path / "stranger"
    pin = upstream(stranger, {"setup.py": "pass\n", "CMakeLists.txt": "\n"})
    blob = git(clone, "rev-parse", "HEAD:ggml/ggml.c")
    for wrong, where, cause in (
        (pin, stranger, r"is not llama\.cpp: it has no ggml"),
        (blob, clone, "is a blob there, not a commit"),
    ):
        with pytest.raises(SpecError, match=cause):
            cache.ensure(wrong, [str(where)], quiet)
        assert not cache.has(wrong)
    assert (cache.pins(), cache.git.run("for-each-ref")) == ([], "")


@pytest.mark.parametrize("pin", ["", "master", "b4567", "e3a74b2", "E" * 40, "-" * 40, "a" * 41])
def test_not_a_commit_id(pin: str, cache: PinCache) -> None:
    with pytest.raises(SpecError, match="40 hex digits"):
        cache.ensure(pin, ["/nowhere"], quiet)
    assert not cache.path.exists()


def test_no_source_named(cache: PinCache) -> None:
    with pytest.raises(SpecError, match="no source") as caught:
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
    trace = tmp_path / "was-here"
    with pytest.raises(SpecError):
        cache.ensure("a" * 40, [source.format(trace)], quiet)
    assert not trace.exists()


def test_passwords_are_not_shown(cache: PinCache) -> None:
    lines: list[str] = []
    with pytest.raises(SpecError) as caught:
        cache.ensure("a" * 40, ["http://me:s3cret@127.0.0.1:9/x"], lines.append)
    assert "s3cret" not in str(caught.value) + caught.value.details + "".join(lines)
    assert without_secrets("https://me:s3cret@example.com/x") == "https://example.com/x"
    assert without_secrets("https://me:s3@cret@example.com/x") == "https://example.com/x"
    assert without_secrets("https://example.com/x?private_token=s3cret") == "https://example.com/x"
    assert without_secrets("git@github.com:ggml-org/llama.cpp") == "git@github.com:ggml-org/llama.cpp"


@pytest.mark.parametrize("damage", [b"", zlib.compress(b"blob 7\0forged\n")], ids=["lost", "forged"])
def test_damaged_clone(damage: bytes, clone: Path, pin: str, cache: PinCache) -> None:
    broken = clone.parent / "broken"
    shutil.copytree(clone, broken)
    blob = git(broken, "rev-parse", f"{pin}:ggml/ggml.c")
    path = broken / ".git" / "objects" / blob[:2] / blob[2:]
    path.unlink()
    if damage:
        path.write_bytes(damage)
    with pytest.raises(SpecError, match="its only source"):
        cache.ensure(pin, [str(broken)], quiet)
    assert not cache.has(pin)
    cache.ensure(pin, [str(broken), str(clone)], quiet)
    assert content(cache, pin) == "second"


def test_what_a_killed_fetch_leaves(clone: Path, pin: str, cache: PinCache) -> None:
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
        child = ask(cache, pin, url)
        assert child.stdout
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
        children = [ask(cache, commit_id, str(clone)) for commit_id in wanted]
        first_lines = [child.stdout.readline() for child in children if child.stdout]
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0]
    assert first_lines == 3 * ["waiting for another dgxlab that fetches a pin\n"]
    assert sum("fetching" in output for output in outputs) == len(set(wanted))
    assert sorted(cache.pins()) == sorted(set(wanted))
    cache.git.run("fsck", "--full", "--strict")


def test_progress_of_a_silent_source(clone: Path, pin: str, cache: PinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgxlab.source.programs.select.select", _impatient)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"git://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(SpecError, match="120 s"):
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
    script(hooks / "reference-transaction", f"#!/bin/sh\ntouch {trace}\n")
    (Path.home() / ".gitconfig").write_text(
        f'[url "{clone.as_uri()}"]\n insteadOf = https://llama.invalid/llama.cpp\n[core]\n hooksPath = {hooks}\n'
        "[fetch]\n prune = true\n[protocol]\n version = 0\n[transfer]\n fsckObjects = true\n"
    )
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    cache.ensure(pin, ["https://llama.invalid/llama.cpp"], quiet)
    assert content(cache, pin) == "second"
    assert not trace.exists()


def test_place_that_is_a_file(clone: Path, pin: str, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(SpecError, match="cannot be written: Not a directory"):
        PinCache(tmp_path / "thesis.txt" / "cache").ensure(pin, [str(clone)], quiet)


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
    output, _ = ask(cache, pin, str(source), str(clone), limit=100_000).communicate()
    assert output.splitlines()[-1] == f"9 {cache.path} cannot be written: File too large"
    assert not cache.has(pin)
    assert list((cache.path / "tmp").glob("*")) == []
    cache.ensure(pin, [str(source)], quiet)


def test_damaged_cache_heals(clone: Path, pin: str, cache: PinCache) -> None:
    cache.ensure(pin, [str(clone)], quiet)
    (cache.path / "HEAD").unlink()
    assert not cache.has(pin)
    cache.ensure(pin, [str(clone)], quiet)
    assert content(cache, pin) == "second"


@pytest.mark.parametrize(
    ("setting", "base"), [(None, "~/.cache"), ("/big/disk", "/big/disk"), ("relative", "~/.cache")]
)
def test_default_place(setting: str | None, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting:
        monkeypatch.setenv("XDG_CACHE_HOME", setting)
    assert cache_path() == Path(base).expanduser() / "dgxlab" / "llama.cpp.git"
