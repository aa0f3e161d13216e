"""A server that answers as llama-server does, or misbehaves: the faults that the real one cannot be asked for.

    python tests/tools/server.py HOW -m MODEL -np SLOTS -c TOKENS --host HOST --port PORT

It has a thread a stream, and a step of 2 ms for each token. HOW is `well`, `untimed` where it does not tell its own
time, `thinks` for three seconds before it says what it serves, `pauses` as long once, or one fault of FAULTS.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any

FAULTS = (
    *("dies", "never ready", "hangs", "another model", "few slots", "no facts", "500", "killed", "stalls", "malformed"),
    *("cached", "end of text", "bunches", "slow stream", "slow tail", "leaves", "turns away"),
)
STEP_S = 0.002
SLOW_S = 0.010, 0.014
"""The step of most streams, and of the slow one: far more than the delays of a busy machine."""
PAUSE_S = 3.0

how, *argv = sys.argv[1:]
options = dict(zip(argv[::2], argv[1::2], strict=True))
numbers, passed = count(), count()
pause = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, status: int, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        if self.path == "/health":
            if how == "hangs":
                time.sleep(60)
            self.reply(503 if how == "never ready" else 200, {"status": "ok"})
        elif self.path == "/props":
            time.sleep(PAUSE_S * (how == "thinks"))
            slots = int(options["-np"])
            props = {
                "model_path": "other.gguf" if how == "another model" else options["-m"],
                "total_slots": 1 if how == "few slots" else slots,
                "default_generation_settings": {"n_ctx": int(options["-c"]) // slots},
            }
            self.reply(200, {} if how == "no facts" else props)
        elif self.path == "/version":
            self.reply(200, {"version": "0.1"})
        else:
            served = "other.gguf" if how == "another model" else options["-m"]
            self.reply(200, {"data": [{"id": served, "meta": {"n_vocab": 32000}}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["ignore_eos"]
        number = next(numbers)
        if how == "500" and number == 3:
            self.reply(500, {"error": {"message": "out of toys"}})
            return
        with pause:  # the fourth to come here: a thread may overtake another that has a lower number
            time.sleep(PAUSE_S * (how == "pauses" and next(passed) == 3))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if self.path == "/completion":
            assert asked["cache_prompt"] is False
            self.generate(number, asked)
        else:
            self.openai(asked)

    def openai(self, asked: Any) -> None:
        """Answer as llama-server's own /v1/completions does: no counts but at the end."""
        assert asked["model"] == options["-m"]
        for _ in range(asked["max_tokens"]):
            time.sleep(STEP_S)
            self.events([b'{"choices": [{"text": "x", "finish_reason": null}]}'])
        usage = {"completion_tokens": asked["max_tokens"], "prompt_tokens": len(asked["prompt"])}
        usage |= {"prompt_tokens_details": {"cached_tokens": 0}}
        last = {"choices": [{"text": "", "finish_reason": "length"}]}
        self.events([json.dumps(each).encode() for each in (last, {"choices": [], "usage": usage})] + [b"[DONE]"])
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def generate(self, number: int, asked: Any) -> None:
        n_prompt, n_gen = len(asked["prompt"]), asked["n_predict"]
        waiting: list[bytes] = []
        total = n_gen - 9 if how == "end of text" else n_gen
        for n in range(1, total + 1):
            if n == 5:
                self.misbehave(number)
            time.sleep(SLOW_S[number % 4 == 1] if how == "slow stream" else STEP_S)
            if n == 1:
                first = time.monotonic()
            waiting.append(json.dumps({"content": "x", "stop": False, "tokens_predicted": n}).encode())
            if how != "bunches" or n % 8 == 0:
                self.events(waiting)
        ms = 1e3 * (time.monotonic() - first) * {"slow tail": 0.5, "untimed": 0, "500": 0}.get(how, 1)
        cached = 7 if how == "cached" else 0
        timings = {"cache_n": cached, "prompt_n": n_prompt - cached, "predicted_n": total, "predicted_ms": ms}
        end = {"stop": True, "stop_type": "eos" if total < n_gen else "limit", "tokens_predicted": total}
        end["id_slot"] = asked["id_slot"]
        if how in ("leaves", "turns away"):  # before the client can know that this wave is over
            self.server.socket.shutdown(socket.SHUT_RDWR)
        self.events([*waiting, json.dumps({**end, "timings": timings}).encode()])
        self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True
        if how == "leaves":
            sys.stderr.write("out of toys\n\n")
            sys.stderr.flush()
            os._exit(7)

    def misbehave(self, number: int) -> None:
        if how == "killed" and number == 6:
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stalls":
            time.sleep(60)
        if how == "malformed" and number == 2:
            self.events([b'{"content": "x", "tokens_pre'])

    def events(self, waiting: list[bytes]) -> None:
        text = b"".join(b"data: %s\n\n" % each for each in waiting)
        waiting.clear()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
        self.wfile.flush()


if __name__ == "__main__":
    assert how in ("well", "untimed", "thinks", "pauses", *FAULTS)
    if how == "dies":  # as where the port is taken
        sys.exit(3)
    ThreadingHTTPServer.request_queue_size = 1024
    ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
