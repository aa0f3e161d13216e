"""Kept raw files: whole or not there, and nothing that a tar says is believed."""

import contextlib
import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dgxlab.errors import CheckFailed, UsageError
from dgxlab.lab.raw import content as raw_content
from dgxlab.lab.raw import incoming, listing, path_of, unpack

BIG = 1 << 22


def entry(
    name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE, link: str = ""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    info.size = len(content) if kind == tarfile.REGTYPE else 0
    return info, content


def pack(path: Path, *entries: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as archive:
        for info, content in entries:
            archive.addfile(info, io.BytesIO(content))
    return path


def commented(name: str) -> tuple[tarfile.TarInfo, bytes]:
    info, content = entry(name)
    info.pax_headers = {"comment": "0" * BIG}
    return info, content


def sparse(name: str) -> tuple[tarfile.TarInfo, bytes]:
    info, content = entry(name)
    info.pax_headers = {"GNU.sparse.map": "0,1", "GNU.sparse.size": str(1 << 30)}
    return info, content


HOSTILE = {
    "absolute": entry("/tmp/x"),
    "upwards": entry("raw/../../x"),
    "upwards at once": entry("../x"),
    "elsewhere": entry("other/x"),
    "hidden": entry("raw/.x"),
    "control": entry("raw/x\x1b[2J"),
    "long": entry("raw/" + "x" * 300),
    "nameless": entry("raw/"),
    "link": entry("raw/x", kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "hard link": entry("raw/x", kind=tarfile.LNKTYPE, link="plan.json"),
    "device": entry("raw/x", kind=tarfile.CHRTYPE),
    "pipe": entry("raw/x", kind=tarfile.FIFOTYPE),
    "folder": entry("raw", kind=tarfile.DIRTYPE),
    "twice": entry("plan.json"),
    "hole": sparse("raw/x"),
    "comment": commented("raw/x"),
}


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_anything_but_plain_files_is_refused(tmp_path: Path, hostile: tuple[tarfile.TarInfo, bytes]) -> None:
    path = pack(tmp_path / "a.tar.gz", entry("plan.json"), hostile, entry("raw/x", b"through"))
    with pytest.raises(CheckFailed, match="no raw file"):
        listing(path)
    with pytest.raises(CheckFailed, match="no raw file"):
        unpack(path, tmp_path / "out")
    there = sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*"))
    assert there == ["a.tar.gz", "home", "out", "out/plan.json", "out/raw"]


def test_more_than_announced_is_refused(tmp_path: Path) -> None:
    empty = [entry(f"raw/{number}", b"") for number in range(BIG // 512)]
    for entries in ([entry("raw/x", bytes(BIG))], empty):
        path = pack(tmp_path / "a.tar.gz", *entries)
        assert path.stat().st_size < BIG // 10
        with pytest.raises(CheckFailed, match="was announced"):
            listing(path, BIG // 2)
        assert len(listing(path, 2 * BIG)) == len(entries)
    path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + bytes(BIG)))
    with pytest.raises(CheckFailed, match="follows its end"):
        listing(path)


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    path = pack(tmp_path / "a.tar.gz", entry("plan.json", b"{}"), entry("raw/run-0.out", bytes(range(256)) * 8))
    whole, good = path.read_bytes(), listing(path)
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckFailed, match="is damaged"):
            listing(path)
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x40]) + whole[at + 1 :])
        with contextlib.suppress(CheckFailed):
            assert listing(path) == good  # gzip's own header has bytes that mean nothing
    path.write_bytes(gzip.compress(gzip.decompress(whole)[:1500]))  # a whole gzip of half a tar
    with pytest.raises(CheckFailed, match="is damaged"):
        listing(path)


def test_unpack_and_copy_give_the_same_bytes(tmp_path: Path) -> None:
    content = bytes(range(256)) * 10000
    path = pack(tmp_path / "a.tar.gz", entry("plan.json", b"{}"), entry("raw/run-0.out", content))
    unpack(path, tmp_path / "new" / "out")
    assert (tmp_path / "new" / "out" / "raw" / "run-0.out").read_bytes() == content
    assert (tmp_path / "new" / "out" / "plan.json").read_bytes() == b"{}"
    assert raw_content(path, "raw/run-0.out") == content
    assert raw_content(path, "absent") == b""
    with pytest.raises(UsageError, match="cannot unpack into"):
        unpack(path, tmp_path / "new" / "out")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "raw").symlink_to(tmp_path / "new")
    with pytest.raises(UsageError, match="cannot unpack into"):
        unpack(path, tmp_path / "theirs")
    assert not (tmp_path / "new" / "run-0.out").exists()


def fail() -> None:
    raise CheckFailed("no")


@pytest.mark.parametrize("end", [fail, lambda: None], ids=["failed", "filled"])
def test_an_archive_is_whole_or_not_there(tmp_path: Path, end: Callable[[], None]) -> None:
    folder = tmp_path / "data" / "raw"
    path = path_of(folder, "20261120-120301-toy-3f2a9c")
    try:
        with incoming(path) as part:
            part.write(b"half")
            assert not path.exists()
            end()
    except CheckFailed:
        pass
    left = [] if end is fail else [path]
    assert list(folder.iterdir()) == left
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [each.stat().st_mode & 0o777 for each in left] == [0o600] * len(left)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"), incoming(path_of(tmp_path / "file", "job")):
        pass


@pytest.mark.parametrize("job_id", ["../x", "a/b", "", ".hidden", "x" * 200, "a\nb"])
def test_an_id_that_is_no_name_is_refused(tmp_path: Path, job_id: str) -> None:
    with pytest.raises(UsageError, match="is no job's id"):
        path_of(tmp_path, job_id)
