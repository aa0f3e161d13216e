"""The pin cache: upstream commits that experiments name, in one bare repository of the user.

A pin is taken from the first source that has it. Only the commit id is trusted, never the source: git checks every
object against its name, so a source can be missing or wrong, but cannot give other content for the same pin. A pin
exists when its ref exists; the ref is written last.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dgxlab.errors import AGAIN, SpecError, command
from dgxlab.model import COMMIT
from dgxlab.source import packages
from dgxlab.source.git import Git, reason
from dgxlab.source.packages import ConsentNeeded, Progress, SourceError
from dgxlab.source.programs import cache_path, disk_trouble, locked, unwritable, writing

PINS = "refs/dgxlab/pins/"
_INCOMING = "refs/dgxlab/incoming/"
LOCK = "dgxlab.lock"

URL = re.compile(r"(?:https?|ssh|git|file)://\S+|[A-Za-z0-9._-]+@[A-Za-z0-9.-]+:(?!//)\S+")
"""Addresses that git may get; others could make git run commands."""

LLAMA_FILES = ("CMakeLists.txt", "ggml")  # files and folders at llama.cpp's top level
_SCRATCH_S = 86400.0  # a scratch folder not touched for this long was left by a killed client


class PinCache:
    """The user's pins and the patched trees made from them, in a bare repository that is created on first use.

    `trusted` says whether the user agrees to fetch any package that a spec names, not only known ones.
    """

    def __init__(self, path: Path | None = None, *, trusted: bool = False) -> None:
        self.path = (path or cache_path()).absolute()
        self.trusted = trusted
        self.git = Git(self.path)

    def ensure(self, pin: str, sources: Sequence[str], on_progress: Progress) -> None:
        """Fetch a pin from the first of `sources` that has it; return at once if it is in the cache.

        Args:
            sources: Git URLs, clones on this machine, `pypi:llama-cpp-python==VERSION`, or that sdist's file.
            on_progress: Called with a line from time to time during a fetch.

        Raises:
            SpecError: if no source has it; `details` has each source's cause.
        """
        check_pin(pin)
        if self.has(pin):
            return
        if not sources:
            raise SpecError(f"pin {pin[:12]} is not here yet and no source is named", next="add llama_cpp.sources")
        with writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path / LOCK, lambda: on_progress("waiting for another dgxlab that fetches a pin")):
            if not self.has(pin):
                self._prepare()
                self._take_from_first(pin, sources, on_progress)

    def has(self, pin: str) -> str:
        """Return the tree of a pin that is in the cache, with all its files; "" if it is not."""
        return self.git.attempt("rev-parse", "--quiet", "--verify", f"{PINS}{pin}^{{tree}}").text

    def require(self, pin: str) -> str:
        """Return the tree of a pin; SpecError if it is not in the cache."""
        check_pin(pin)
        if tree := self.has(pin):
            return tree
        message = f"pin {pin[:12]} is not in the cache {self.path}"
        raise SpecError(message, next=f"dgxlab patch check --pin {pin} fetches it")

    def pins(self) -> list[str]:
        """Return all pins in the cache, in no particular order."""
        return self.git.attempt("for-each-ref", "--format=%(refname:lstrip=3)", PINS).text.split()

    def pack(self, wants: Sequence[str], haves: Sequence[str] = ()) -> list[bytes]:
        """Return a git pack of commits, for a repository on a host; the list has a single item.

        A pin is packed without its history: the receiver must list it in its `shallow` file first.

        `haves` are commits that the receiver has; unknown ones are ignored. With any, the pack is thin, for
        `git index-pack --stdin --fix-thin`.
        """
        listed = self.git.run("cat-file", "--batch-check=%(objectname)", input="".join(f"{c}\n" for c in haves))
        known = [commit for commit, line in zip(haves, listed.splitlines(), strict=True) if line == commit]
        revisions = "".join(f"{commit}\n" for commit in [*wants, *(f"^{commit}" for commit in known)])
        args = ["--revs", "--stdout", "--delta-base-offset", "--quiet", *(["--thin"] if haves else [])]
        return [self.git.read("pack-objects", *args, input=revisions)]

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a temporary folder on the cache's disk, which is removed afterwards."""
        with writing(self.path):
            (self.path / "tmp").mkdir(exist_ok=True)
            for folder in self.path.glob("tmp/*"):  # a model that was being sent may be gigabytes
                with suppress(FileNotFoundError):  # another client has just removed it
                    if time.time() - folder.stat().st_mtime > _SCRATCH_S:
                        shutil.rmtree(folder, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=self.path / "tmp", ignore_cleanup_errors=True) as own:
                yield Path(own)

    def _prepare(self) -> None:
        """Create the repository and remove leftovers of a killed fetch; needs the lock."""
        self.git.run("init", "--quiet", "--bare", "--template=", str(self.path))
        stale = [self.path / "shallow.lock", self.path / "packed-refs.lock", *self.path.glob("objects/pack/tmp_*")]
        stale += [path for ref in (PINS, _INCOMING) for path in self.path.glob(f"{ref}*.lock")]
        for path in stale:
            path.unlink(missing_ok=True)

    def _take_from_first(self, pin: str, sources: Sequence[str], on_progress: Progress) -> None:
        causes: list[str] = []
        mend = "correct llama_cpp.pin, or add to llama_cpp.sources a clone on this machine that has it"
        for source in sources:
            if causes:
                on_progress(causes[-1])
            try:
                self._take(pin, source, on_progress)
                return
            except SourceError as error:
                causes.append(f"{without_secrets(source)}: {str(error).replace(source, without_secrets(source))}")
                mend = f"{AGAIN} with --trust-source" if isinstance(error, ConsentNeeded) else mend
        number = "its only source" if len(sources) == 1 else f"any of its {len(sources)} sources"
        message = f"pin {pin} cannot be taken from {number}" + (f": {causes[0]}" if len(causes) == 1 else "")
        raise SpecError(message, next=mend, details="\n".join(causes))

    def _take(self, pin: str, source: str, on_progress: Progress) -> None:
        """Fetch the pin from one source, or raise SourceError."""
        on_progress(f"fetching {pin[:12]} from {without_secrets(source)}")
        local = Path(source).expanduser()
        if source.startswith("pypi:") or local.is_file():
            with self.scratch() as folder:
                archive = local
                if source.startswith("pypi:"):
                    archive = packages.download_sdist(source, folder / "sdist", on_progress, trusted=self.trusted)
                on_progress(f"unpacking {archive.name}")
                head = packages.unpack_sdist(archive, folder / "llama.cpp.git")
                carried = f", it carries {head[:12]}" if head else ""
                self._fetch(pin, str(folder / "llama.cpp.git"), on_progress, carried)
        elif local.is_dir():
            self._fetch(pin, str(local.resolve()), on_progress)
        elif URL.fullmatch(source):
            self._fetch(pin, source, on_progress)
        else:
            raise SourceError("neither a git URL, nor a folder or file on this machine, nor pypi:NAME==VERSION")

    def _fetch(self, pin: str, url: str, on_progress: Progress, carried: str = "") -> None:
        """Fetch one commit without its history, check it, and only then write its ref."""
        incoming = f"{_INCOMING}{pin}"
        flags = "--depth=1 --progress --no-tags --no-prune --no-recurse-submodules --no-write-fetch-head"
        git = self.git.configured(user=True)
        # protocol version 2 serves any commit, not only branch tips
        ran = git.follow(
            *("-c", "protocol.version=2", "-c", "http.lowSpeedLimit=1000", "-c", "http.lowSpeedTime=60"),
            *("fetch", *flags.split(), "--", url, f"+{pin}:{incoming}"),
            on_line=lambda line: on_progress(line.removeprefix("remote: ")) if "% (" in line else None,
        )
        if full := disk_trouble(ran.err):
            raise unwritable(self.path, full)
        if ran.rc != 0:
            cause = reason(ran.err)
            if "not our ref" in ran.err or "couldn't find remote ref" in ran.err:
                cause = f"it has no commit {pin[:12]}"
            elif "unadvertised object" in ran.err:
                cause = "it gives out branch tips only, not this commit: use a clone of it"
            raise SourceError(f"{cause}{carried}")
        try:
            kind = self.git.run("cat-file", "-t", pin)
            if kind != "commit":
                raise SourceError(f"{pin[:12]} is a {kind} there, not a commit")
            if missing := set(LLAMA_FILES) - set(self.git.run("ls-tree", "--name-only", pin).splitlines()):
                raise SourceError(f"commit {pin[:12]} is not llama.cpp: it has no {' and no '.join(sorted(missing))}")
            check = self.git.attempt("rev-list", "--objects", "--quiet", pin)
            if check.rc != 0:
                raise SourceError(f"commit {pin[:12]} did not arrive whole: {reason(check.err)}")
        except SourceError:
            self.git.run("update-ref", "-d", incoming)
            raise
        self.git.run("update-ref", "--stdin", input=f"update {PINS}{pin} {pin}\ndelete {incoming}\n")


def check_pin(pin: str) -> None:
    """Raise a SpecError unless `pin` is a full commit id."""
    if not COMMIT.fullmatch(pin):
        mend = command("dgxlab", "pin", pin)
        raise SpecError(f"a pin is a full commit id, 40 hex digits, not {pin!r}", next=mend)


def without_secrets(source: str) -> str:
    """Return a source for messages: a URL without user, password and query, so that commands with it still work."""
    return re.sub(r"^(https?://)(?:[^/?#]*@)?([^?#]*).*", r"\1\2", source)
