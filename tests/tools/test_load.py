"""The client: what it reads of a server that behaves, and of every one that does not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest

from dgxlab.tools.llama_server import ServeBench, parse
from dgxlab.tools.load import APIS, Problem, prompts
from dgxlab.tools.wave import Stream, Wave, answer, arrivals
from tests.conftest import PROJECT

SERVER = Path(__file__).with_name("server.py")
BENCH = ServeBench("m", (16,), (120,), (1, 4), repetitions=1, ready_s=30.0, stall_s=5.0)
DRIVE = "import sys; from dgxlab.tools import load; load.GRACE_S = 1; load.main(*sys.argv[1:])"


def drive(how: str, **changes: Any) -> str:
    """Return what the client prints of a server; as with the agent, in a process group of its own, stderr in a file."""
    (launch,) = BENCH.launches({}, lambda model, cell: True)
    *_, settings = launch.argv[:5]
    asked = json.dumps({**json.loads(settings), **changes})
    options = ("-m", "m.gguf", "-np", "4", "-c", "1024", "--host", "127.0.0.1", "--port", "0")
    argv = [sys.executable, "-c", DRIVE, asked, sys.executable, str(SERVER), how, *options]
    with TemporaryFile() as errors:
        streams = {"stdout": subprocess.PIPE, "stderr": errors}
        return subprocess.run(argv, cwd=PROJECT, text=True, start_new_session=True, check=True, **streams).stdout


def problems(how: str, **changes: Any) -> str:
    (launch,) = BENCH.launches({}, lambda model, cell: True)
    return "; ".join(parse(drive(how, **changes), launch.cells).problems)


@pytest.mark.parametrize("how", ["well", "thinks"])
def test_every_token_has_a_time(how: str) -> None:
    about, *rows = map(json.loads, drive(how).splitlines())
    assert about["server"].items() >= {"model": "m.gguf", "slots": 4, "n_ctx": 256, "n_vocab": 32000}.items()
    assert [(row["pl"], len(row["waves"])) for row in rows] == [(1, 2), (4, 2)]
    for wave in (wave for row in rows for wave in row["waves"]):
        for slot, stream in enumerate(wave["streams"]):
            end = stream["end"]
            assert (stream["status"], end["slot"], end["stop"], sum(stream["tokens"])) == (200, slot, "limit", 120)
            assert len(stream["at_us"]) == len(stream["tokens"])
            # 119 steps of 2 ms, less one for how late the first may be seen
            assert sum(stream["at_us"][1:]) > 118 * 2000 or sum(stream["at_us"]) > 120 * 2000


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "the server ended with status 3"),
        ("another model", "the server has the model other.gguf, not m.gguf"),
        ("no facts", "the server does not say what it serves"),
        ("few slots", "B4: the server has 1 slots, too few for 4 streams"),
        ("500", 'HTTP 500: {"error": {"message": "out of toys"}}'),
        ("killed", "the server ended by SIGKILL"),
        ("leaves", "the server ended with status 7: out of toys"),
        ("turns away", "the server cannot be asked: Connection refused"),
        ("malformed", "an unexpected event: {"),
        ("cached", "9 tokens of its prompt were computed and 7 came from a cache"),
        ("end of text", "got 111 tokens, not 120: it was stopped by eos"),
        ("bunches", "of the events arrived with the one before"),
        ("slow stream", "they did not share the steps"),
        ("slow tail", "% off the speed that the server reports"),
    ],
)
def test_a_server_that_misbehaves_gives_no_number(how: str, told: str) -> None:
    assert told in problems(how)


@pytest.mark.parametrize("how", ["never ready", "hangs"])
def test_a_server_that_is_never_ready_is_ended(how: str) -> None:
    assert "not ready within 8 s: /health on port" in problems(how, ready_s=8.0)


def test_requests_arrive_as_a_poisson_process() -> None:
    due = arrivals(2000, 50.0, "seed")
    gaps = [after - before for before, after in zip([0, *due], due, strict=False)]
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(20e6, rel=0.1)
    assert statistics.stdev(gaps) == pytest.approx(20e6, rel=0.1)
    assert due == arrivals(2000, 50.0, "seed") != arrivals(2000, 50.0, "other")


def test_requests_are_sent_when_they_are_due() -> None:
    _, row = map(json.loads, drive("well", rate=[100.0], requests=20).splitlines())
    assert (row["rate"], len(row["waves"])) == (100.0, 2)
    for number, wave in enumerate(row["waves"]):
        streams = wave["streams"]
        assert [each["sent_us"] for each in streams] == [at // 1000 for at in arrivals(20, 100.0, f"100.0 {number}")]
        assert {(each["status"], sum(each["tokens"])) for each in streams} == {(200, 120)}
        assert min(each["behind_us"] for each in streams) >= 0


def test_a_server_that_pauses_is_not_excused() -> None:
    """Requests that are due in a pause wait for its end, and their times say so: they are sent all the same."""
    _, row = map(json.loads, drive("pauses", rate=[100.0], requests=20).splitlines())
    streams = row["waves"][0]["streams"]
    end = streams[3]["sent_us"] + 3_000_000  # at the earliest: it begins when a fourth request has come
    assert all(each["sent_us"] + each["behind_us"] < end for each in streams)
    assert sum(each["sent_us"] + each["at_us"][0] < end for each in streams) <= 3


def test_a_client_that_is_late_adds_its_delay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wave = Wave(server.getsockname(), [b"GET / HTTP/1.1\r\n\r\n"], [-200_000_000])
        wave.run(0.1)
    (stream,) = wave.streams
    assert (stream.begin, stream.stalled) == (wave.begin - 200_000_000, True)
    assert stream.behind >= 200_000_000


def test_no_request_waits_for_a_server_that_takes_none() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server:
        wave = Wave(server.getsockname(), [b"x" * 9_000_000] * 5, [0, 0, 10_000_000, 20_000_000, 60_000_000_000])
        wave.run(3.0)
    assert [each.stalled for each in wave.streams] == [True] * 4
    assert max(each.behind for each in wave.streams) < 3_000_000_000


@pytest.mark.parametrize("ended", [True, False])
def test_what_has_arrived_is_read_to_its_end(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    """Epoll tells it once: of more streams than are read between two looks, much more than a read takes."""
    monkeypatch.setattr("dgxlab.tools.wave.READ", 50)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as server, contextlib.ExitStack() as stack:
        sent = Wave(server.getsockname(), [b"x"] * 100)
        for _ in range(100):
            connection = stack.enter_context(server.accept()[0])
            connection.sendall(HEAD + b"\r\n" + CHUNKS)
            if ended:
                connection.shutdown(socket.SHUT_WR)
        sent.run(20.0 if ended else 0.5)
    assert {each.stalled for each in sent.streams} == {not ended}
    assert {len(answer(each.reads)[1]) for each in sent.streams} == {2}


def test_silence_counts_from_the_last_event() -> None:
    """A server that goes on is read for much longer, and one that falls silent no more than that."""

    def serve() -> None:
        with server.accept()[0] as connection:
            connection.sendall(HEAD + b"\r\n")
            for _ in range(15):
                time.sleep(0.1)
                silent.append(time.perf_counter_ns())  # before, as this thread may have to wait afterwards
                connection.sendall(CHUNKS)
            over.wait(20.0)

    silent: list[int] = []
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        sent = Wave(server.getsockname(), [b"x"])
        pool.submit(serve)
        sent.run(1.0)
        lasted = time.perf_counter_ns() - silent[-1]
        over.set()
    (stream,) = sent.streams
    assert (stream.stalled, len(answer(stream.reads)[1])) == (True, 30)
    assert 1e9 <= lasted < 10e9


def test_a_connection_that_breaks_is_a_stream_without_an_end() -> None:
    def serve() -> None:
        with server.accept()[0] as first, server.accept()[0] as second:
            first.recv(1)
            first.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            first.close()  # resets
            time.sleep(0.1)
            second.sendall(HEAD + b"\r\n" + CHUNKS)

    with socket.create_server(("127.0.0.1", 0), backlog=2) as server, ThreadPoolExecutor(1) as pool:
        sent = Wave(address := server.getsockname(), [b"x"] * 2)
        pool.submit(serve)
        sent.run(20.0)
    refused = Wave(address, [b"x"], [0])
    refused.run(20.0)
    streams = [*sent.streams, *refused.streams]
    assert not any(each.stalled for each in streams)
    assert [answer(each.reads)[0] for each in streams] == [0, 200, 0]


def test_what_arrives_while_requests_are_sent_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    def send(stream: Stream) -> None:
        time.sleep(0.02)
        stream.unsent = b""

    monkeypatch.setattr(Stream, "send", send)
    with socket.create_server(("127.0.0.1", 0), backlog=5) as server:
        wave = Wave(server.getsockname(), [b"x"] * 5)
        wave.run(0.1)
    assert wave.away >= 100_000_000


@pytest.mark.parametrize("events", [50, 15])
def test_a_client_that_is_busy_only_while_tokens_arrive_is_seen(events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for a prompt, and then needs a whole processor, for two spans and for less than one."""

    def serve() -> None:
        with server.accept()[0] as connection:
            time.sleep(0.6)
            connection.sendall(CHUNKS)
            busy.wait(20.0)  # on a busy machine it sees the first event late
            for _ in range(events - 1):
                time.sleep(0.01)
                connection.sendall(CHUNKS)

    def used() -> int:
        marks.append(time.perf_counter_ns())
        if len(marks) > 1:
            busy.set()
        return marks[-1] - marks[1] if len(marks) > 1 else 0

    marks: list[int] = []
    busy = threading.Event()
    monkeypatch.setattr("dgxlab.tools.wave.SPAN_NS", 200_000_000)
    monkeypatch.setattr(time, "process_time_ns", used)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        sent = Wave(server.getsockname(), [b"x"])
        pool.submit(serve)
        sent.run(20.0)
    assert sent.cpu == pytest.approx(1.0, abs=0.1)


def test_a_stream_that_fails_ends_no_other() -> None:
    """One of 128 is answered by HTTP 500; the others are read to their ends."""
    *_, row = map(json.loads, drive("500", pl=[128], tg=20, waves=1, stall_s=20.0).splitlines())
    ended = Counter((each["status"], sum(each.get("tokens", ()))) for each in row["waves"][0]["streams"])
    assert ended == {(200, 20): 127, (500, 0): 1}


def test_an_answer_before_the_request_was_read_is_read() -> None:
    def serve() -> None:
        with server.accept()[0] as connection:
            connection.sendall(b"HTTP/1.1 413 Too Large\r\n\r\n{}")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 20):
                pass

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        wave = Wave(server.getsockname(), [b"x" * 20_000_000])
        pool.submit(serve)
        wave.run(20.0)
    ((status, _),) = [answer(each.reads) for each in wave.streams]
    assert status == 413


def test_silence_while_no_request_is_due_is_no_stall() -> None:
    first, second = arrivals(2, 0.7, "0.7 0")
    assert second - first > 3.5e9
    (_, row) = map(json.loads, drive("well", rate=[0.7], requests=2, waves=1, stall_s=3.0).splitlines())
    assert len([each for each in row["waves"][0]["streams"] if each.get("end")]) == 2


def test_a_server_that_stalls_is_ended() -> None:
    told = problems("stalls", stall_s=4.0)
    assert "B1: stream 0 stalled after 4 tokens" in told
    assert "B4" not in told  # the server still has the first stream


def test_the_openai_api_gives_the_same_times() -> None:
    about, *rows = map(json.loads, drive("well", engine="vllm").splitlines())
    assert about["server"].items() >= {"model": "m.gguf", "slots": None, "version": "0.1"}.items()
    for stream in (stream for row in rows for wave in row["waves"] for stream in wave["streams"]):
        assert stream["end"] == {"stop": "length", "prompt": 16, "cached": 0, "ms": None}
        assert (stream["status"], stream["tokens"]) == (200, [1] * 120)


def test_the_openai_api_tells_another_model() -> None:
    assert "the model other.gguf, which its command does not name" in problems("another model", engine="vllm")


def test_the_openai_api_may_count_tokens() -> None:
    api = APIS["vllm"]
    text = {"choices": [{"text": "x", "finish_reason": None}]}
    assert api.progress({**text, "usage": {"completion_tokens": 3, "prompt_tokens": 16}}, 1) == (3, {})
    assert api.progress(text, 3) == (4, {})
    last = {
        "choices": [{"text": "x", "finish_reason": "length"}],
        "usage": {"completion_tokens": 6, "prompt_tokens": 16},
    }
    assert api.progress(last, 4) == (6, {"stop": "length", "prompt": 16, "cached": None, "ms": None})
    cached = {"completion_tokens": 6, "prompt_tokens": 16, "prompt_tokens_details": {"cached_tokens": 15}}
    assert api.progress({"choices": [], "usage": cached}, 6) == (6, {"prompt": 1, "cached": 15, "ms": None})


EVENTS = [b'{"n": 1}', b'{"n": 2, "text": "\\r\\n"}', b"[DONE]"]
CHUNKS = b"".join(b"data: %s\n\n" % each for each in EVENTS)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize("size", [1, 3, 20, 1000])
@pytest.mark.parametrize("read", [1, 2, 7, 1000])
def test_events_are_read_whatever_they_are_cut_into(size: int, read: int) -> None:
    parts = [CHUNKS[i : i + size] for i in range(0, len(CHUNKS), size)]
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    for text in (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + body, HEAD + b"\r\n" + CHUNKS):
        status, events = answer([(i, text[i : i + read]) for i in range(0, len(text), read)])
        assert (status, [line for _, line in events]) == (200, EVENTS[:2])
        assert [now for now, _ in events] == sorted(now for now, _ in events)


@pytest.mark.parametrize(
    ("text", "status", "body"),
    [
        (b"", 0, b""),
        (b"HTTP/1.1 2", 0, b""),
        (b"HTTP/1.1 503 Busy\r\n\r\n{}", 503, b"{}"),
        (b"SSH-2.0\r\n\r\n", 0, b""),
    ],
)
def test_an_answer_without_events_is_its_body(text: bytes, status: int, body: bytes) -> None:
    assert answer([(0, text)]) == (status, [(0, body)])


def test_more_prompts_than_can_begin_differently_are_refused() -> None:
    assert len(list(prompts(375, 3, 1000, "seed"))) == 375
    with pytest.raises(Problem, match="the vocabulary has 375 tokens for that"):
        list(prompts(376, 3, 1000, "seed"))


def test_no_two_prompts_begin_alike() -> None:
    drawn = list(prompts(1024, 3, 32000, "seed"))
    assert len({prompt[0] for prompt in drawn}) == 1024
    assert {len(prompt) for prompt in drawn} == {3}
    assert min(map(min, drawn)) >= 4000
    assert max(map(max, drawn)) < 16000
    assert drawn != list(prompts(1024, 3, 32000, "other"))


def test_a_server_that_cannot_be_started_is_named() -> None:
    argv = [sys.executable, "-c", DRIVE, json.dumps({"engine": "vllm", "ready_s": 1.0}), "/nowhere/vllm", "serve"]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=True)
    told = "the server cannot be started: No such file or directory: /nowhere/vllm"
    assert json.loads(ended.stdout) == {"problem": told}


def test_the_server_does_not_outlive_the_client(tmp_path: Path) -> None:
    """TERM first; a server that ignores it is killed."""
    deaf = f"trap 'echo asked to end' TERM; echo $$ >{tmp_path}/pid; while :; do sleep 0.1; done"
    settings: dict[str, Any] = {"engine": "llama-server", "ready_s": 4.0}
    argv = [sys.executable, "-c", DRIVE, json.dumps(settings), "sh", "-c", deaf]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, start_new_session=True, check=True)
    assert "not ready within 4 s: no port was opened" in ended.stdout
    assert ended.stderr == "asked to end\n"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
