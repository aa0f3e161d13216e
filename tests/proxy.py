"""A faulty network in front of a port of this machine: delays, cuts, silences and refusals, on command.

It carries the loopback to the loopback and needs no rights. It cannot drop packets: the sending kernel's own timers
never object to a silence made here, so what notices it must sit above TCP.
"""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Self

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
CHUNK = 1 << 16


class Proxy:
    """Forwards connections to 127.0.0.1:`target` from `port`, a port of its own.

    Attributes:
        target: Where the next connection goes.
        delay_s: Added to every byte, each way: half of the added round trip.
        cut_after: Bytes that may still travel from the server to the client, counted down; then every connection is
            reset. None for any number. cut_after_up: the same from the client to the server.
        silent_after: Bytes that may still travel from the server to the client before a blackhole; None for any number.
        silent_since: Since when nothing is carried, on the monotonic clock; None while it carries.
        resets: How often open connections were reset.
        refuse: Reset new connections at once.
        connections, down_bytes: How many were accepted, and carried to clients, so far.
        turns: How often a client spoke after the server had spoken: the round trips, where one waits for the other.
    """

    def __init__(self, target: int, *, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s
        self.cut_after: int | None = None
        self.cut_after_up: int | None = None
        self.silent_after: int | None = None
        self.silent_since: float | None = None
        self.resets = 0
        self.refuse = False
        self.connections = self.down_bytes = self.turns = 0
        self.port = 0
        self.target = target
        self._server_spoke = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        self._call(self._reset_all)

    def wait_until_closed(self) -> None:
        """Wait until no connection is open, so that `cut_after` counts the bytes of the next one only.

        Raises:
            TimeoutError: if one stays open for 10 s.
        """
        deadline = time.monotonic() + 10
        while self._writers:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(self._writers) // 2} connections are still open")
            time.sleep(0.01)

    def blackhole(self) -> None:
        self._call(self._be_silent)

    def heal(self) -> None:
        """Carry again, beginning with what was held back."""
        self._call(self._carry_again)

    def _call(self, work: Callable[[], None]) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(work)
        self._loop.call_soon_threadsafe(done.set)
        done.wait()

    def _be_silent(self) -> None:
        self._gate.clear()
        self.silent_since = self.silent_since or time.monotonic()

    def _carry_again(self) -> None:
        self._gate.set()
        self.silent_after = self.silent_since = None

    async def _listen(self) -> None:
        self._gate = asyncio.Event()
        self._gate.set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _end(self) -> None:
        self._server.close()
        self._gate.set()
        self._reset_all()
        if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=30)  # cancelled ones would be reported as errors

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.refuse:
            self._reset(writer)
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            self._reset(writer)
            return
        pair = {writer, up_writer}
        self._writers |= pair
        try:
            async with asyncio.TaskGroup() as group:  # an error on either side ends both
                for source, sink, down in ((reader, up_writer, False), (up_reader, writer, True)):
                    on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1024)
                    group.create_task(self._take(source, on_the_way))
                    group.create_task(self._deliver(on_the_way, sink, down=down))
        except* OSError:
            for end in pair:
                self._reset(end)
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _take(self, reader: asyncio.StreamReader, on_the_way: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            await self._gate.wait()
            chunk = await reader.read(CHUNK)
            await on_the_way.put((self._loop.time() + self.delay_s, chunk))

    async def _deliver(
        self, on_the_way: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter, *, down: bool
    ) -> None:
        while True:
            due, chunk = await on_the_way.get()
            if self.delay_s:
                await asyncio.sleep(due - self._loop.time())
            await self._gate.wait()
            if not chunk:
                writer.write_eof()
                return
            if down:
                self.down_bytes += len(chunk)
            else:
                self.turns += self._server_spoke
            self._server_spoke = down
            if down and self.silent_after is not None:
                self.silent_after -= len(chunk)
                if self.silent_after <= 0:
                    self.silent_after = None
                    self._be_silent()
                    await self._gate.wait()
            name = "cut_after" if down else "cut_after_up"
            left: int | None = getattr(self, name)
            writer.write(chunk[:left])
            if left is not None:
                setattr(self, name, left - len(chunk) if left > len(chunk) else None)
                if left <= len(chunk):
                    self._reset_all()
                    return
            await writer.drain()

    def _reset_all(self) -> None:
        self.resets += bool(self._writers)
        for writer in list(self._writers):
            self._reset(writer)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        sock: socket.socket = writer.get_extra_info("socket")
        if sock.fileno() >= 0:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        writer.transport.abort()
