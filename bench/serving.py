"""The client that loads servers: what it costs the machine that it measures, and by how much its times are late."""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from bench.figure import Figure, figure
from dgxlab.stats import median
from dgxlab.tools.llama_server import LOOPBACK
from dgxlab.tools.streams import percentile
from dgxlab.tools.wave import Wave, answer

SOURCE = Path(__file__).with_name("source.py")
SENT = re.compile(rb'"sent": (\d+)')


def client(quick: bool) -> Figure:
    """Measure the client's share of a processor with 128 streams that get 18,000 events a second."""
    shares = [100 * _wave(128, 8 if quick else 300, 128 / 18_000).cpu for _ in range(1 if quick else 9)]
    return figure("client", "share of a processor of the serving client, 128 streams, 18,000 events/s", shares, "%", 20)


def streams(quick: bool) -> Figure:
    """Measure how much later than its sending an event of one in 1,024 streams is seen, which all get one each 50 ms.

    That includes how long the client waits for a processor, so that it depends on what else the machine does: on a busy
    one, `chrt -f 5 python -m bench --only streams` shows what an idle one would. The table has fewer streams too.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    table, worst = {}, [0.0]
    for count in (8, 16) if quick else (128, 256, 512, 1024):
        late = [list(_late_ms(_wave(count, 4 if quick else 40, 0.05))) for _ in range(1 if quick else 5)]
        worst = [percentile(each, 99.9) for each in late]
        every = [ms for each in late for ms in each]
        above = 100 * sum(ms > 1 for ms in every) / len(every)
        table[f"{count}"] = {
            "p50 ms": median(every),
            "p99.9 ms": median(worst),
            "max ms": max(every),
            "% > 1 ms": above,
        }
    what = "99.9 % of events of 1,024 streams, 20,000 a second, are seen within"
    return replace(figure("streams", what, worst, "ms", 1.0), table=table)


def _wave(count: int, tokens: int, step_s: float) -> Wave:
    """Return a wave of streams, each of which got a token in each step of a cheap source."""
    argv = [sys.executable, str(SOURCE), str(count), str(tokens), str(step_s)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as source:
        assert source.stdout is not None
        wave = Wave((LOOPBACK, int(source.stdout.readline())), [b"POST / HTTP/1.1\r\n\r\n"] * count)
        wave.run(60)
        source.terminate()
    return wave


def _late_ms(wave: Wave) -> Iterator[float]:
    for stream in wave.streams:
        for now, line in answer(stream.reads)[1]:
            if match := SENT.search(line):
                yield (now - int(match[1])) / 1e6
