"""A host's repository, and what interrupted commands leave of it."""

import os
import time
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


@pytest.fixture
def empty(tmp_path: Path) -> Objects:
    return Objects(tmp_path / "src" / "llama.cpp.git")


@pytest.fixture
def full(stream: tuple[str, bytes], empty: Objects) -> Objects:
    empty.receive(BytesIO(stream[1]))
    return empty


def test_a_repository_is_made_whole_or_not_at_all(
    stream: tuple[str, bytes], empty: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Objects, *args: str, **options: object) -> str:
        Path(args[-1]).mkdir()
        raise RemoteError("git init failed on the host: No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Objects, "_git", fail)
        with pytest.raises(RemoteError, match="No space left"):
            empty.receive(BytesIO(stream[1]))
    assert list(empty.path.parent.iterdir()) == []
    empty.receive(BytesIO(stream[1]))
    assert empty.missing([stream[0]]) == []


def test_a_cut_pack_is_removed_by_the_next_one_after_an_hour(stream: tuple[str, bytes], empty: Objects) -> None:
    pin, content = stream
    with pytest.raises(RemoteError, match="arrive whole"):
        empty.receive(BytesIO(content[:-100]))
    packs = empty.path / "objects" / "pack"
    (cut,) = packs.glob("tmp_*")
    young = packs / "tmp_pack_young"
    young.touch()
    then = time.time() - module.CUT_PACK_S - 1
    os.utime(cut, (then, then))
    empty.receive(BytesIO(content))
    assert list(packs.glob("tmp_*")) == [young]
    assert empty.missing([pin]) == []


def test_a_file_of_a_commit_is_copied_byte_for_byte(stream: tuple[str, bytes], full: Objects, tmp_path: Path) -> None:
    full.copy(stream[0], "ggml/ggml.c", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == toy.GGML
    with pytest.raises(RemoteError, match=rf"^models/v.gguf of {stream[0][:12]} .*: fatal: "):
        full.copy(stream[0], "models/v.gguf", tmp_path / "copy")


@pytest.mark.parametrize("damaged", ["HEAD", "objects/pack/*.pack"])
def test_a_damaged_repository_is_set_aside_and_filled_again(
    stream: tuple[str, bytes], full: Objects, damaged: str
) -> None:
    pin, content = stream
    (path,) = full.path.glob(damaged)
    path.chmod(0o600)
    path.write_bytes(b"")
    assert full.missing([pin]) == [pin]
    assert [path.name[:8] for path in full.path.parent.iterdir()] == [".broken-"]
    full.receive(BytesIO(content))
    assert full.missing([pin]) == []


def test_damage_that_a_checkout_finds(stream: tuple[str, bytes], full: Objects, tmp_path: Path) -> None:
    (pack,) = full.path.glob("objects/pack/*.pack")
    pack.chmod(0o600)
    pack.write_bytes(pack.read_bytes()[:100] + bytes(pack.stat().st_size - 100))  # the objects are named, not readable
    with pytest.raises(RemoteError, match="were damaged") as caught:
        full.check_out(tmp_path / "work", tmp_path / "index", stream[0], "")
    assert caught.value.next == AGAIN
    assert full.missing([stream[0]]) == [stream[0]]


def test_failures_in_a_sound_repository_change_nothing(stream: tuple[str, bytes], full: Objects) -> None:
    with pytest.raises(RemoteError, match=r"^git ls-tree failed .*fatal"):
        full.names("0" * 40)
    with pytest.raises(RemoteError, match="arrive whole"):
        full.receive(BytesIO(stream[1][:-100]))
    assert full.missing([stream[0]]) == []
