"""Load a server with concurrent streams, and print when each token arrived. It runs on the host, as a launch's program.

    load.main('{"pl": [1, 8], "pp": 128, "tg": 256, "waves": 4, ...}', SERVER, ARGUMENT, ...)

One thread reads all streams with epoll and only notes time and bytes; HTTP and JSON are parsed after a wave. The server
is in the process group of this program, so that nothing of a launch survives it; its output goes to stderr.

A line of JSON for `server`, then one for each number of streams, `pl`, or `rate` of requests, with its `waves`. The
streams of `pl` start at once, those of a `rate` when they are due, whatever the server does meanwhile. Each has the
times of its events. A `problem` ends the output.
"""

import contextlib
import ctypes
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

from dgxlab.tools.llama_server import LOOPBACK
from dgxlab.tools.wave import Stream, Wave, answer, arrivals

PR_SET_PDEATHSIG = 1
GRACE_S = 10.0  # wait between TERM and KILL
PROBE_S = 2.0  # timeout of a question to a server that may not be ready
ANSWER_S = 30.0  # timeout of a question to one that is, on a machine that may be busy
DYING_S = 2.0  # how long a server that was killed may take to end after its connections
PAUSE_S = 0.1
COMMON_VOCAB = 20_000  # a size of the vocabulary that every large model exceeds, for servers that do not tell it
UNTOLD = (OSError, HTTPException, ValueError, LookupError, TypeError)
EXCERPT = 200  # characters of an answer, or of the server's last line, that a problem quotes
LOG_END = 4096  # bytes at the end of the server's output in which its last line is looked for


class Problem(Exception):
    """Why no further wave can be measured; the message is a sentence."""


# -- the server -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def started(argv: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running server; end it by TERM, then KILL.

    Raises Problem if it cannot be started, or has ended when something fails with it.
    """
    libc = ctypes.CDLL(None)
    try:
        server = subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            close_fds=False,  # an orphan still holds the locks that this program inherited
            preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),  # noqa: PLW1509 - one thread
        )
    except OSError as error:
        raise Problem(f"the server cannot be started: {error.strerror}: {argv[0]}") from error
    try:
        yield server
    except (Problem, OSError):
        _alive(server, DYING_S)  # a server that has ended is the cause of whatever failed
        raise
    finally:
        server.terminate()
        try:
            server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def ready(server: subprocess.Popen[bytes], limit_s: float) -> int:
    """Return the port on which the server answers that it is healthy; raises Problem if it ends or takes too long."""
    deadline, ports = time.monotonic() + limit_s, set[int]()
    while time.monotonic() < deadline:
        _alive(server)
        ports = listening()
        for port in ports:
            with contextlib.suppress(OSError, HTTPException):
                if _get(port, "/health", PROBE_S)[0] == 200:
                    return port
        time.sleep(PAUSE_S)
    opened = " or ".join(map(str, sorted(ports)))
    state = f"/health on port {opened} did not answer 200" if opened else "no port was opened"
    raise Problem(f"the server was not ready within {limit_s:g} s: {state}")


def listening() -> set[int]:
    """Return the ports on which processes of this process group listen; vLLM has some for itself too.

    They are read from the kernel: a server that was there before cannot be mistaken for ours.
    """
    inodes = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) == os.getpgrp():
                links = [str(fd.readlink()) for fd in (stat.parent / "fd").iterdir()]
                inodes |= {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def _alive(server: subprocess.Popen[bytes], dying_s: float = 0.0) -> None:
    """Raise Problem if the server has ended, or does in so many seconds."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        code = server.wait(dying_s)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        raise Problem(f"the server ended {how}{_last_line()}")


def _last_line() -> str:
    """Return the last line of stderr, which the server shares, after a colon; "" if there is none, or no file."""
    path = Path(f"/proc/self/fd/{sys.stderr.fileno()}")
    if not path.is_file():
        return ""
    with path.open("rb") as log:
        log.seek(max(0, path.stat().st_size - LOG_END))
        last = log.read().decode(errors="replace").strip().rpartition("\n")[2]
    return last and f": {last[:EXCERPT]}"


def _get(port: int, path: str, limit_s: float = ANSWER_S) -> tuple[int, bytes]:
    connection = HTTPConnection(LOOPBACK, port, timeout=limit_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


# -- requests ---------------------------------------------------------------------------------------------------------


def prompts(count: int, tokens: int, n_vocab: int, seed: str) -> Iterator[list[int]]:
    """Yield prompts of random tokens, no two of which begin alike.

    Tokens with a special meaning are at both ends of vocabularies, so only those between are used. Raises Problem if
    there are fewer of them than prompts.
    """
    known, source = range(n_vocab // 8, n_vocab // 2), random.Random(seed)  # noqa: S311 - no secret
    if count > len(known):
        raise Problem(f"{count} prompts cannot all begin differently: the vocabulary has {len(known)} tokens for that")
    for first in source.sample(known, count):
        yield [first, *source.choices(known, k=tokens - 1)]


class Api:
    """How an engine is asked: llama-server by its own requests, which have all that must be checked."""

    path = "/completion"

    def facts(self, port: int, argv: Sequence[str]) -> dict[str, Any]:
        """Return what a server says of itself: model, slots, tokens of a slot, size of the vocabulary.

        Raises Problem if it does not, or serves another model than `argv` says.
        """
        model = argv[argv.index("-m") + 1]
        try:
            props, models = (json.loads(_get(port, path)[1]) for path in ("/props", "/v1/models"))
            about = {
                "model": props["model_path"],
                "slots": props["total_slots"],
                "n_ctx": props["default_generation_settings"]["n_ctx"],
                "n_vocab": models["data"][0]["meta"]["n_vocab"],
            }
        except UNTOLD as error:
            raise Problem(f"the server does not say what it serves: {error!r}") from error
        if about["model"] != model:
            raise Problem(f"the server has the model {about['model']}, not {model}")
        return about

    def body(self, prompt: Sequence[int], n_gen: int, about: Mapping[str, Any], slot: int) -> dict[str, Any]:
        """Return the body of a request for exactly `n_gen` tokens, the likeliest, with nothing from a cache.

        A server that chooses slots by itself (-1) takes those not used for longest. Where these are not neighbours, it
        decodes them in several batches, so that a wave could be slow only because of the waves before it.
        """
        wanted = {"n_predict": n_gen, "ignore_eos": True, "cache_prompt": False, "temperature": 0.0, "stream": True}
        return {"prompt": prompt, "id_slot": slot, **wanted}

    def progress(self, event: Mapping[str, Any], count: int) -> tuple[int, dict[str, Any]]:
        """Return the number of tokens so far, given that before an event, and of the last event the stream's `end`.

        That has the slot, the tokens of the prompt that were computed and those from a cache, why it ended, the
        server's own time since the first token, in ms, and how many tokens of drafts were accepted.
        """
        total, timings = int(event["tokens_predicted"]), event.get("timings")
        if timings is None:
            return total, {}
        end = {"prompt": timings["prompt_n"], "cached": timings["cache_n"], "ms": timings["predicted_ms"]}
        end |= {"accepted": timings.get("draft_n_accepted", 0)}
        return total, {"slot": event["id_slot"], "stop": event.get("stop_type"), **end}


class OpenAi(Api):
    """vLLM and others: what the API does not tell is None. Events without a count are a token each."""

    path = "/v1/completions"

    def facts(self, port: int, argv: Sequence[str]) -> dict[str, Any]:
        """Return the model, its longest context and the version, as far as the server tells them."""
        try:
            (model,) = json.loads(_get(port, "/v1/models")[1])["data"]
            status, text = _get(port, "/version")
            version = json.loads(text)["version"] if status == 200 else None
            about = {"model": model["id"], "slots": None, "n_ctx": model.get("max_model_len"), "version": version}
        except UNTOLD as error:
            raise Problem(f"the server does not say what it serves: {error!r}") from error
        if about["model"] not in {*argv, *(Path(word).name for word in argv)}:
            raise Problem(f"the server has the model {about['model']}, which its command does not name")
        return {**about, "n_vocab": COMMON_VOCAB}

    def body(self, prompt: Sequence[int], n_gen: int, about: Mapping[str, Any], slot: int) -> dict[str, Any]:
        """Return the body of a request."""
        wanted = {"max_tokens": n_gen, "min_tokens": n_gen, "ignore_eos": True, "temperature": 0.0, "stream": True}
        usage = {"include_usage": True, "continuous_usage_stats": True}
        return {"model": about["model"], "prompt": prompt, **wanted, "stream_options": usage}

    def progress(self, event: Mapping[str, Any], count: int) -> tuple[int, dict[str, Any]]:
        """Return the number of tokens so far, and the end."""
        usage, choices = event.get("usage") or {}, event["choices"]
        total = int(usage.get("completion_tokens", count + bool(choices and choices[0]["finish_reason"] is None)))
        end = {"stop": choices[0]["finish_reason"]} if choices and choices[0]["finish_reason"] else {}
        if usage and (end or not choices):
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
            end |= {"prompt": usage["prompt_tokens"] - (cached or 0), "cached": cached, "ms": None}
        return total, end


APIS: Mapping[str, Api] = {"llama-server": Api(), "vllm": OpenAi()}  # by engine


def request(path: str, body: Mapping[str, Any]) -> bytes:
    """Return a whole HTTP request."""
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text


# -- the program ------------------------------------------------------------------------------------------------------


def loaded(wave: Wave, stall_s: float, api: Api) -> dict[str, Any]:
    """Send a wave and return what is printed of it."""
    wave.run(stall_s)
    streams = [_times(each, wave.begin, api) for each in wave.streams]
    return {"cpu": round(wave.cpu, 4), "late_us": wave.away // 1000, "streams": streams}


def _times(stream: Stream, begin: int, api: Api) -> dict[str, Any]:
    """Return a stream's answer: `at_us` after the request began, each relative to the one before, and `tokens`."""
    status, lines = answer(stream.reads)
    times: dict[str, Any] = {"sent_us": (stream.begin - begin) // 1000, "status": status}
    times |= {"behind_us": stream.behind // 1000} if stream.behind else {}
    times |= {"stalled": True} if stream.stalled else {}
    last, count, at, tokens = stream.begin, 0, [], []
    end: dict[str, Any] = {}
    for now, line in lines:
        if status != 200:
            return {**times, "problem": line.decode(errors="replace")[:EXCERPT]}
        try:
            total, last_end = api.progress(json.loads(line), count)
        except UNTOLD:
            return {**times, "problem": f"an unexpected event: {line.decode(errors='replace')[:EXCERPT]}"}
        if total > count:  # the last event repeats the number
            at.append((now - last) // 1000)
            tokens.append(total - count)
            last, count = last + 1000 * at[-1], total
        end |= last_end
    return {**times, "at_us": at, "tokens": tokens, "end": end}


def main(settings: str, *argv: str) -> None:
    """Start the server, load it with each number of streams, and print the lines."""
    asked = json.loads(settings)
    api = APIS[asked["engine"]]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # 1024 by default, for the server too
    try:
        with started(argv) as server:
            begin = time.monotonic()
            port = ready(server, asked["ready_s"])
            about = {**api.facts(port, argv), "ready_s": round(time.monotonic() - begin, 3)}
            _print({"server": about})
            mode = "rate" if "rate" in asked else "pl"
            for load in asked[mode]:
                waves = []
                for number in range(asked["waves"]):
                    count, seed = asked.get("requests", load), f"{load} {number}"
                    due = arrivals(count, load, seed) if mode == "rate" else ()
                    bodies = [
                        api.body(text, asked["tg"], about, slot if mode == "pl" else -1)
                        for slot, text in enumerate(prompts(count, asked["pp"], about["n_vocab"], seed))
                    ]
                    requests = [request(api.path, body) for body in bodies]
                    waves.append(loaded(Wave((LOOPBACK, port), requests, due), asked["stall_s"], api))
                    if not (whole := all(stream.get("end") for stream in waves[-1]["streams"])):
                        break
                _print({"pp": asked["pp"], "tg": asked["tg"], mode: load, "waves": waves})
                _alive(server, 0.0 if whole else DYING_S)
                if any(stream.get("stalled") for stream in waves[-1]["streams"]):
                    raise Problem("streams stalled: what the server still does would disturb the next ones")
    except Problem as problem:
        _print({"problem": str(problem)})
    except OSError as error:
        _print({"problem": f"the server cannot be asked: {error.strerror or error}"})


def _print(line: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
