"""Network file systems are found in mountinfo, local ones are let through."""

from pathlib import Path

import pytest

from dgxlab.errors import SpecError
from dgxlab.store import Store, connect

MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:26 / /home rw,relatime shared:13 - nfs4 filer:/home rw,vers=4.2
31 30 254:1 / /home/me/scratch rw - xfs /dev/nvme0n1p1 rw
32 22 0:40 / /mnt/c rw - 9p C: rw,trans=fd
33 22 0:41 / /mnt/with\\040space rw - cifs //nas/share rw
34 22 0:42 / /mnt/box rw,nosuid - fuse.sshfs me@box:/ rw
35 22 0:43 / /mnt/fuse rw - fuse.ntfs-3g /dev/sdb1 rw
36 22 0:44 / /mnt/over rw - ext4 /dev/sdc rw
37 36 0:45 / /mnt/over rw - nfs filer:/over rw
38 22 0:46 / /mnt/optional rw master:7 propagate_from:2 - nfs filer:/o rw
a line that is not of the form
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
        ("/mnt/optional/results.db", "nfs at /mnt/optional"),
    ],
)
def test_network_mount(path: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "MOUNTINFO", tmp_path / "absent")
    assert connect.on_network(Path(path)) is None  # where there is no such file (macOS), all is taken to be local
    connect.MOUNTINFO.write_text(MOUNTINFO)
    assert connect.on_network(Path(path)) == expected


def test_open_refuses_a_network_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = tmp_path / "mountinfo"
    listed.write_text(f"1 0 0:1 / / rw - ext4 /dev/vda rw\n2 1 0:2 / {tmp_path}/far rw - nfs4 filer:/lab rw\n")
    monkeypatch.setattr(connect, "MOUNTINFO", listed)
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to("far")
    with pytest.raises(SpecError, match=r"network file system \(nfs4 at .*far\)"):
        Store.open(tmp_path / "near" / "results.db")
    Store.open(tmp_path / "results.db").close()
