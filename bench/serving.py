"""The client that loads servers: what it costs the machine that it measures."""

from __future__ import annotations

import sys
from pathlib import Path

from bench.figure import Figure, figure
from dgxlab.tools import load

SERVER = Path(__file__).resolve().parent.parent / "tests" / "tools" / "server.py"
N_PROMPT = 64


def client(quick: bool) -> Figure:
    """Measure the client's processor time for an event, with 128 streams of a stand-in server."""
    streams, tokens = (4, 16) if quick else (128, 128)
    api, size = load.APIS["llama-server"], streams * (N_PROMPT + tokens + 1)
    argv = [sys.executable, str(SERVER), "well", "-m", "m.gguf", "-np", str(streams), "-c", str(size)]
    costs = []
    with load.started([*argv, "--host", load.LOOPBACK, "--port", "0"]) as child:
        port = load.ready(child, limit_s=30)
        about = api.facts(port, argv)
        for number in range(2 if quick else 9):
            texts = load.prompts(streams, N_PROMPT, about["n_vocab"], str(number))
            bodies = [load.request(api.path, api.body(text, tokens, about)) for text in texts]
            wave = load.loaded(load.Wave((load.LOOPBACK, port), bodies), 60, api)
            took_us = max(each["sent_us"] + sum(each["at_us"]) for each in wave["streams"])
            events = sum(len(each["at_us"]) for each in wave["streams"])
            costs.append(wave["cpu"] * took_us / events)
    what = f"processor time of the serving client for an event, {streams} streams"
    # 18,000 events a second, of 128 streams of a small model, are then 0.2 of a processor
    return figure("client", what, costs, "us", 11.0)
