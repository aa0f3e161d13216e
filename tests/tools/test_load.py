"""The client: what it reads of a server that behaves, and of every one that does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dgxlab.tools.llama_server import ServeBench, parse
from dgxlab.tools.load import APIS, answer, prompts
from tests.conftest import PROJECT

SERVER = Path(__file__).with_name("server.py")
BENCH = ServeBench("m", (16,), (120,), (1, 4), repetitions=1, ready_s=30.0, stall_s=5.0)
DRIVE = "import sys; from dgxlab.tools import load; load.GRACE_S = 1; load.main(*sys.argv[1:])"


def drive(how: str, **changes: float | str) -> str:
    """Return what the client prints of a server; as the agent does, in a process group of its own."""
    (launch,) = BENCH.launches({}, lambda model, cell: True)
    *_, settings = launch.argv[:5]
    asked = json.dumps({**json.loads(settings), **changes})
    options = ("-m", "m.gguf", "-np", "4", "-c", "1024", "--host", "127.0.0.1", "--port", "0")
    argv = [sys.executable, "-c", DRIVE, asked, sys.executable, str(SERVER), how, *options]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, start_new_session=True, check=True)
    return ended.stdout


def problems(how: str, **changes: float) -> str:
    (launch,) = BENCH.launches({}, lambda model, cell: True)
    return "; ".join(parse(drive(how, **changes), launch.cells).problems)


def test_every_token_has_a_time() -> None:
    about, *rows = map(json.loads, drive("well").splitlines())
    assert about["server"].items() >= {"model": "m.gguf", "slots": 4, "n_ctx": 256, "n_vocab": 32000}.items()
    assert [(row["pl"], len(row["waves"])) for row in rows] == [(1, 2), (4, 2)]
    for wave in (wave for row in rows for wave in row["waves"]):
        for stream in wave["streams"]:
            assert (stream["status"], stream["end"]["stop"], sum(stream["tokens"])) == (200, "limit", 120)
            assert len(stream["at_us"]) == len(stream["tokens"])
            # 119 steps of 2 ms, less one for how late the first may be seen
            assert sum(stream["at_us"][1:]) > 118 * 2000 or sum(stream["at_us"]) > 120 * 2000


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("dies", "the server ended with status 3"),
        ("another model", "the server has the model other.gguf, not m.gguf"),
        ("no facts", "the server does not say what it serves"),
        ("few slots", "B4: the server has 1 slots of 256 tokens"),
        ("500", 'HTTP 500: {"error": {"message": "out of toys"}}'),
        ("killed", "the server ended by SIGKILL"),
        ("malformed", "an event that is none: {"),
        ("cached", "9 tokens of its prompt were computed and 7 came from a cache"),
        ("end of text", "got 111 tokens, not 120: it was stopped by eos"),
        ("bunches", "of the events arrived with the one before"),
        ("slow stream", "they did not share the steps"),
        ("slow tail", "of the speed that the server measured itself"),
    ],
)
def test_a_server_that_misbehaves_gives_no_number(how: str, told: str) -> None:
    assert told in problems(how)


@pytest.mark.parametrize("how", ["never ready", "hangs"])
def test_a_server_that_is_never_ready_is_ended(how: str) -> None:
    assert "not ready within 1 s: /health on port" in problems(how, ready_s=1.0)


def test_a_server_that_stalls_is_ended() -> None:
    assert "B1: stream 0 stalled after 4 tokens" in problems("stalls", stall_s=1.0)


def test_the_openai_api_gives_the_same_times() -> None:
    about, *rows = map(json.loads, drive("well", engine="vllm").splitlines())
    assert about["server"].items() >= {"model": "m.gguf", "slots": None, "version": "0.1"}.items()
    for stream in (stream for row in rows for wave in row["waves"] for stream in wave["streams"]):
        assert stream["end"] == {"stop": "length", "prompt": 16, "cached": 0, "ms": None}
        assert (stream["status"], stream["tokens"]) == (200, [1] * 120)


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


def test_no_two_prompts_begin_alike() -> None:
    drawn = list(prompts(1024, 3, 32000, "seed"))
    assert len({prompt[0] for prompt in drawn}) == 1024
    assert {len(prompt) for prompt in drawn} == {3}
    assert min(map(min, drawn)) >= 4000
    assert max(map(max, drawn)) < 16000
    assert drawn != list(prompts(1024, 3, 32000, "other"))


def test_the_server_does_not_outlive_the_client(tmp_path: Path) -> None:
    """TERM first; a server that ignores it is killed."""
    path = str(tmp_path / "pid")
    write = f"open({path!r}, 'w').write(str(os.getpid()))"
    script = f"import os, signal, time; signal.signal(15, signal.SIG_IGN); {write}; time.sleep(600)"
    settings: dict[str, Any] = {"engine": "llama-server", "ready_s": 1.0}
    argv = [sys.executable, "-c", DRIVE, json.dumps(settings), sys.executable, "-c", script]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, start_new_session=True, check=True)
    assert "not ready within 1 s: no port was opened" in ended.stdout
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
