"""A host's repository, and what interrupted commands leave of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from dgxlab.agent import objects as module
from dgxlab.agent.objects import Objects
from dgxlab.errors import AGAIN, RemoteError
from dgxlab.model import canonical
from dgxlab.source import PinCache
from tests import toy


@pytest.fixture
def stream(tmp_path: Path) -> tuple[str, bytes]:
    """A pin, and what a client sends for it."""
    pin = toy.make_repository(tmp_path / "repository")
    cache = PinCache(tmp_path / "pins.git")
    cache.ensure(pin, [str(tmp_path / "repository")], lambda note: None)
    header = canonical({"commit": pin, "shallow": [pin]}).encode() + b"\n"
    return pin, header + b"".join(cache.pack([pin]))


def test_a_repository_is_made_whole_or_not_at_all(
    stream: tuple[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle of it leaves nothing that would be taken for one."""
    pin, content = stream
    there = Objects(tmp_path / "root" / "src" / "llama.cpp.git")

    def fail(self: Objects, *args: str, **options: object) -> str:
        Path(args[-1]).mkdir()
        raise RemoteError("git init failed on the host: No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Objects, "_git", fail)
        with pytest.raises(RemoteError, match="No space left"):
            there.receive(BytesIO(content))
    assert list(there.path.parent.iterdir()) == []
    there.receive(BytesIO(content))
    assert there.missing([pin]) == []


def test_cut_packs_are_forgotten(stream: tuple[str, bytes], tmp_path: Path) -> None:
    """What a cut stream left an hour ago goes with the next one; what is still on its way stays."""
    pin, content = stream
    there = Objects(tmp_path / "llama.cpp.git")
    with pytest.raises(RemoteError, match="did not arrive whole"):
        there.receive(BytesIO(content[:-100]))
    packs = there.path / "objects" / "pack"
    (cut,) = packs.glob("tmp_*")
    young = packs / "tmp_pack_young"
    young.touch()
    then = time.time() - module.CUT_PACK_S - 1
    os.utime(cut, (then, then))
    there.receive(BytesIO(content))
    assert list(packs.glob("tmp_*")) == [young]
    assert there.missing([pin]) == []


def test_a_file_of_a_commit_is_copied_byte_for_byte(stream: tuple[str, bytes], tmp_path: Path) -> None:
    """One that is not there is named, with the commit and git's own reason."""
    pin, content = stream
    there = Objects(tmp_path / "root" / "src" / "llama.cpp.git")
    there.receive(BytesIO(content))
    there.copy(pin, "ggml/ggml.c", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == toy.GGML
    with pytest.raises(RemoteError, match=rf"^models/v.gguf of {pin[:12]} cannot be read on the host: fatal: .*v.gguf"):
        there.copy(pin, "models/v.gguf", tmp_path / "copy")


def _cut_head(there: Objects) -> None:
    (there.path / "HEAD").write_bytes(b"")


def _cut_pack(there: Objects) -> None:
    (pack,) = there.path.glob("objects/pack/*.pack")
    pack.chmod(0o600)
    pack.write_bytes(b"")


@pytest.mark.parametrize("damage", [_cut_head, _cut_pack])
def test_a_damaged_repository_is_filled_again(
    stream: tuple[str, bytes], tmp_path: Path, damage: Callable[[Objects], None]
) -> None:
    """The first question finds it, sets it aside, and says that everything is missing."""
    pin, content = stream
    there = Objects(tmp_path / "src" / "llama.cpp.git")
    there.receive(BytesIO(content))
    damage(there)
    assert there.missing([pin]) == [pin]
    assert [path.name[:8] for path in there.path.parent.iterdir()] == [".broken-"]
    there.receive(BytesIO(content))
    assert there.missing([pin]) == []


def test_damage_that_a_checkout_finds(stream: tuple[str, bytes], tmp_path: Path) -> None:
    """The objects are named but not to be read: the next question says that they are missing."""
    pin, content = stream
    there = Objects(tmp_path / "src" / "llama.cpp.git")
    there.receive(BytesIO(content))
    (pack,) = there.path.glob("objects/pack/*.pack")
    pack.chmod(0o600)
    pack.write_bytes(pack.read_bytes()[:100] + bytes(pack.stat().st_size - 100))
    with pytest.raises(RemoteError, match="damaged, and must be sent again") as caught:
        there.check_out(tmp_path / "work", tmp_path / "index", pin, "")
    assert caught.value.next == AGAIN
    assert there.missing([pin]) == [pin]


def test_what_fails_in_a_whole_repository_changes_nothing(stream: tuple[str, bytes], tmp_path: Path) -> None:
    """A commit that is not there, a stream that was cut."""
    pin, content = stream
    there = Objects(tmp_path / "src" / "llama.cpp.git")
    there.receive(BytesIO(content))
    with pytest.raises(RemoteError, match="git ls-tree failed on the host: fatal"):
        there.names("0" * 40)
    with pytest.raises(RemoteError, match="did not arrive whole"):
        there.receive(BytesIO(content[:-100]))
    assert there.missing([pin]) == []
