"""Requests to a server, sent at once or each when it is due, and the time of everything that arrives."""

import gc
import random
import re
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

READ = 1 << 16
AT_ONCE = 64
"""Events that are read before epoll is asked for later ones. Reading takes longest, and so long a time can be late."""
SPAN_NS = 1_000_000_000
"""Shortest time over which the use of a processor counts: a mean over a long prompt would hide a client too slow."""


@dataclass
class Stream:
    """One request: when it began, and what arrived when, in ns of the monotonic clock.

    It begins when it is due, so that a server that stalls is not excused from what it kept waiting.
    """

    socket: socket.socket
    unsent: bytes
    begin: int
    behind: int = 0  # how long after its due time it was begun
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    stalled: bool = False

    def send(self) -> None:
        """Send as much as the connection takes."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # closed: there may be an answer to read
            self.unsent = b""


def arrivals(count: int, rate: float, seed: str) -> list[int]:
    """Return when requests are due, in ns from the beginning of a wave: a Poisson process of `rate` a second."""
    source = random.Random(seed)  # noqa: S311 - no secret
    return [int(1e9 * at) for at in accumulate(source.expovariate(rate) for _ in range(count))]


class Wave:
    """Requests that are sent at once, or each when it is `due` in ns, and read to their ends."""

    def __init__(self, server: tuple[str, int], requests: Sequence[bytes], due: Sequence[int] = ()) -> None:
        self._server, self._open = server, bool(due)
        self._waiting = deque(zip(due or [0] * len(requests), requests, strict=True))
        self._poll = select.epoll()
        # those of a closed loop are connected before the clock starts
        self._connected = deque([] if due else [socket.create_connection(server) for _ in requests])
        self._still: dict[int, Stream] = {}
        self.streams: list[Stream] = []  # in the order in which they began
        self.begin = 0  # ns of the monotonic clock
        # largest share of a processor that this program used for SPAN_NS, half of it at the end, or all of a short wave
        self.cpu = 0.0
        self.away = 0  # longest time in ns for which it was not waiting for events: by that a time can be late
        self._marks: list[tuple[int, int]] = []

    def run(self, stall_s: float) -> None:
        """Send and read until all streams have ended, or those that are open were silent for `stall_s`."""
        gc.collect()
        gc.disable()
        self.begin = self._mark()
        with self._poll:
            self._loop(int(1e9 * stall_s))
        if self._marks[1:] and time.perf_counter_ns() - self._marks[-1][0] < SPAN_NS / 2:
            self._marks.pop()  # so short a last span is counted with the one before
        self._mark()
        self.cpu = max((used - before) / (now - then) for (then, before), (now, used) in pairwise(self._marks))
        gc.enable()
        for each in self._still.values():
            each.stalled = True
            each.socket.close()

    def _mark(self) -> int:
        """Note how much of a processor was used until now, and return that time."""
        self._marks.append((time.perf_counter_ns(), time.process_time_ns()))
        return self._marks[-1][0]

    def _loop(self, stall: int) -> None:
        now = heard = self.begin
        noted: deque[tuple[int, int, int]] = deque()
        while self._waiting or self._still:
            heard = heard if self._still else now
            while self._waiting and self.begin + self._waiting[0][0] <= now:
                due, text = self._waiting.popleft()
                self._start(self.begin + due, text)
            next_due = self.begin + self._waiting[0][0] if self._waiting else heard + stall
            until = min(next_due, heard + stall)
            at = time.perf_counter_ns()
            self.away, left = max(self.away, at - now), max(0, until - at) / 1e9
            if self._waiting and not noted:  # epoll alone waits for whole ms
                select.select([self._poll], (), (), left)
            ready = self._poll.poll(0 if self._waiting or noted else left)
            now = time.perf_counter_ns()
            if now - self._marks[-1][0] >= SPAN_NS:
                self._mark()
            heard = now if ready else heard
            if self._still and now - heard >= stall:
                return
            noted.extend((number, event, now) for number, event in ready)
            for _ in range(min(AT_ONCE, len(noted))):
                again = self._serve(*noted[0])
                if not again:
                    noted.popleft()

    def _start(self, due: int, text: bytes) -> None:
        if self._open:
            opened = socket.socket()
            opened.setblocking(False)
            opened.connect_ex(self._server)  # a server that takes no connection must not hold up the others
        else:
            opened = self._connected.popleft()
            opened.setblocking(False)
        now = time.perf_counter_ns()
        stream = Stream(opened, text, due if self._open else now, now - due if self._open else 0)
        self.streams.append(stream)
        self._still[opened.fileno()] = stream
        self._poll.register(opened, select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET)
        if not self._open:
            stream.send()

    def _serve(self, number: int, event: int, now: int) -> bool:
        """Send and read what can be; return whether the same event has more to read."""
        if (stream := self._still.get(number)) is None:  # it has ended since
            return False
        if stream.unsent:
            stream.send()
        if not event & ~select.EPOLLOUT:
            return False
        try:
            chunk = stream.socket.recv(READ)
        except BlockingIOError:
            return False
        except OSError:  # refused or reset: the stream has no end
            chunk = b""
        stream.reads.append((now, chunk))
        if chunk:
            return len(chunk) == READ or bool(event & select.EPOLLRDHUP)
        self._still.pop(number).socket.close()
        return False


def answer(reads: Sequence[tuple[int, bytes]]) -> tuple[int, list[tuple[int, bytes]]]:
    """Return the status of an HTTP answer and its events with their times; without events the body's text.

    The status is 0 where there is no whole head. Chunks need not agree with events.
    """
    status, chunked, left, head, buffer, text = 0, False, 0, False, b"", b""
    events: list[tuple[int, bytes]] = []
    for now, read in reads:
        buffer += read
        if not head:
            top, head, buffer = _parted(buffer, b"\r\n\r\n")
            if not head:
                continue
            match = re.match(rb"HTTP/1\.[01] (\d{3})", top)
            status, chunked = int(match[1]) if match else 0, b"chunked" in top.lower()
        while buffer and chunked:
            if not left:
                line, whole, buffer = _parted(buffer, b"\r\n")
                if not whole:
                    break
                left = int(line, 16) if re.fullmatch(rb"[0-9a-fA-F]+", line) else 0
            text, buffer, left = text + buffer[:left], buffer[left:], max(0, left - len(buffer))
        if not chunked:
            text, buffer = text + buffer, b""
        if status != 200:
            continue
        *lines, text = text.split(b"\n")
        events += [(now, each[5:].strip()) for each in lines if each.startswith(b"data:")]
    if status != 200:
        events = [(0, text)]
    return status, [(now, line) for now, line in events if line != b"[DONE]"]


def _parted(buffer: bytes, end: bytes) -> tuple[bytes, bool, bytes]:
    """Return the part before an end, whether there is one, and the rest: everything without an end."""
    before, mark, rest = buffer.partition(end)
    return (before, True, rest) if mark else (b"", False, buffer)
