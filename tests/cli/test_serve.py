"""`dgxlab serve-record`: a page on the loopback until Ctrl-C, and the same file afterwards."""

import hashlib
import signal
import socket
from urllib.request import urlopen

from tests.cli.conftest import Project


def test_it_serves_until_ctrl_c_and_leaves_the_record_as_it_was(measured: Project) -> None:
    record = measured.folder / "results.db"
    before = hashlib.sha256(record.read_bytes()).digest()
    server = measured.spawn("serve-record", "--port", "0")
    try:
        assert server.stdout
        address = server.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        with urlopen(f"{address}/gates.json?_shape=array") as reply:  # noqa: S310 - of the loopback, as the line above says
            assert b'"MUL_MAT on CPU"' in reply.read()
    finally:
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=30)
    assert (server.returncode, err) == (0, "")
    assert hashlib.sha256(record.read_bytes()).digest() == before
    assert [path.name for path in measured.folder.glob("results.db*")] == ["results.db"]


def test_a_port_in_use(measured: Project) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ran = measured.run("serve-record", "--port", port)
    assert (ran.rc, ran.out, ran.next) == (2, "", "dgxlab serve-record --port 0")
    assert ran.error == f"port {port} cannot be used: Address already in use"
