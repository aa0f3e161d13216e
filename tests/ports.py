"""Ports of the loopback for servers that must be told one."""

import socket


def kept_port() -> tuple[socket.socket, int]:
    """Return a port that no other program is given until the socket is closed: every connection of a test takes one.

    A server that reuses addresses can listen there meanwhile.
    """
    probe = socket.socket()
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does: so both may be bound
    probe.bind(("127.0.0.1", 0))
    return probe, int(probe.getsockname()[1])
