"""Network file systems are known by the table of mounts, local ones are let through."""

from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.store import Store, connect

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
filer:/home /home nfs4 rw,vers=4.2 0 0
/dev/nvme0n1p1 /home/me/scratch xfs rw 0 0
C: /mnt/c 9p rw,trans=fd 0 0
//nas/share /mnt/with\\040space cifs rw 0 0
me@box:/ /mnt/box fuse.sshfs rw,nosuid 0 0
/dev/sdb1 /mnt/fuse fuse.ntfs-3g rw 0 0
/dev/sdc /mnt/over ext4 rw 0 0
filer:/over /mnt/over nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/lab/results.db", None),
        ("/home/me/results.db", "nfs4 at /home"),
        ("/homework/results.db", None),
        ("/home/me/scratch/results.db", None),
        ("/mnt/c/lab/results.db", "9p at /mnt/c"),
        ("/mnt/with space/results.db", "cifs at /mnt/with space"),
        ("/mnt/box/results.db", "fuse.sshfs at /mnt/box"),
        ("/mnt/fuse/results.db", None),
        ("/mnt/over/results.db", "nfs at /mnt/over"),
    ],
)
def test_network_mount(path: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "MOUNTS", tmp_path / "absent")
    assert connect.on_network(Path(path)) is None  # where there is no such file (macOS), all is taken to be local
    connect.MOUNTS.write_text(MOUNTS)
    assert connect.on_network(Path(path)) == expected


def test_open_refuses_a_network_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "mounts"
    listed.write_text(f"/dev/vda / ext4 rw 0 0\nfiler:/lab {tmp_path}/far nfs4 rw 0 0\n")
    monkeypatch.setattr(connect, "MOUNTS", listed)
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far")
    with pytest.raises(SpecError, match=r"network file system \(nfs4 at .*far\)"):
        Store.open(tmp_path / "near" / "results.db")
    Store.open(tmp_path / "results.db").close()
