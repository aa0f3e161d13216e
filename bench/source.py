"""A cheap source of events for the serving client: `python bench/source.py STREAMS TOKENS STEP_S`.

It prints its port, and answers each wave of STREAMS requests by TOKENS events, one to each in a step, as a server does.
An event says when it was sent, on the clock that the client reads too.
"""

from __future__ import annotations

import select
import socket
import sys
import time

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT = b'data: {"tokens_predicted": %d, "sent": %d}\n\n'


def answer(server: socket.socket, streams: int, tokens: int, step_s: float) -> None:
    """Take a wave of requests, and send their events."""
    connections = [server.accept()[0] for _ in range(streams)]
    for each in connections:
        each.recv(1 << 16)
        each.send(HEAD)
    due = time.perf_counter()
    for number in range(1, tokens + 1):
        due += step_s
        select.select((), (), (), max(0.0, due - time.perf_counter()))
        for each in connections:
            each.send(EVENT % (number, time.perf_counter_ns()))
    for each in connections:
        each.close()


if __name__ == "__main__":
    streams, tokens = map(int, sys.argv[1:3])
    with socket.create_server(("127.0.0.1", 0), backlog=streams) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            answer(server, streams, tokens, float(sys.argv[3]))
