"""The streams of a wave: from the times at which tokens arrived to metrics, or to why they are not the server's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from dgxlab.stats import median
from dgxlab.tools.rows import Refused

STEADY = 64  # tokens that each stream must receive while all streams generate
AGREES = 0.02  # largest distance of the client's speeds from the server's own, over all streams
UNEQUAL = 0.1  # a stream may be this much slower than the median: in one batch all get a token a step
BUNCHED = 0.25
"""Share of the events that may arrive together with the one before; more means that something collects them."""
TOGETHER = 0.05  # share of the median distance of events below which two arrive together

BEHIND = 0.1  # largest p95 of how late requests were sent, of the median time to the first token

OPEN = ("speed_out", "ttft_p50_ms", "ttft_p95_ms", "itl_p50_ms", "itl_p99_ms")
"""Metrics of requests that arrive at random times. A sample of each is of one wave."""
METRICS = ("speed_pp", "speed_tg", *OPEN)  # metrics of streams that begin at once


def steady(streams: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the speed of each stream, in t/s, while all of them generate.

    That is between the latest first token and the earliest last one. A stream's tokens after its first event there are
    divided by the time since, so that the ends of the window cost none. Raises Refused if some stream got fewer than
    STEADY tokens in that time.
    """
    arrivals = [[(each["sent_us"] + us, tokens) for us, tokens in _arrivals(each)] for each in streams]
    begin, end = max(each[0][0] for each in arrivals), min(each[-1][0] for each in arrivals)
    speeds = []
    for number, arrived in enumerate(arrivals):
        inside = [(us, tokens) for us, tokens in arrived if begin <= us <= end]
        count = sum(tokens for _, tokens in inside[1:])
        if count < STEADY:
            raise Refused(f"no steady window: stream {number} got {count} tokens while all generated, not {STEADY}")
        speeds.append(count / (inside[-1][0] - inside[0][0]) * 1e6)
    return speeds


def _arrivals(stream: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return when each step's tokens arrived, in us after the request, and how many: usually one event with one token.

    What a step accepts of a draft arrives as several events, almost together. As each step adds one token to those
    that it accepts, it is known how many steps there were; the longest times between events are those between steps.
    """
    at_us, tokens = stream["at_us"], stream["tokens"]
    steps = sum(tokens) - stream["end"].get("accepted", 0)
    first = set(sorted(range(1, len(at_us)), key=at_us.__getitem__, reverse=True)[: steps - 1])
    arrived: list[tuple[int, int]] = []
    for number, us in enumerate(accumulate(at_us)):
        together = arrived.pop()[1] if number and number not in first else 0
        arrived.append((us, tokens[number] + together))
    return arrived


def _gaps(streams: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the times between steps of all streams, in us."""
    return [after - before for each in streams for (before, _), (after, _) in pairwise(_arrivals(each))]


def metrics(streams: Sequence[Mapping[str, Any]], pp: int, tg: int) -> dict[str, float]:
    """Return METRICS of a wave of whole answers that began at once; raises Refused as `steady` does."""
    sent = min(each["sent_us"] for each in streams)
    begin = max(each["sent_us"] + each["at_us"][0] for each in streams)
    speed_pp = pp * len(streams) / (begin - sent) * 1e6
    return {"speed_pp": speed_pp, "speed_tg": sum(steady(streams)), **latencies(streams, tg)}


def latencies(streams: Sequence[Mapping[str, Any]], tg: int) -> dict[str, float]:
    """Return OPEN of a wave of whole answers: times since a request was due, also where it was sent later."""
    first = [each["at_us"][0] / 1e3 for each in streams]
    gaps = [us / 1e3 for us in _gaps(streams)]
    sent = min(each["sent_us"] for each in streams)
    last = max(each["sent_us"] + sum(each["at_us"]) for each in streams)
    return {
        "speed_out": tg * len(streams) / (last - sent) * 1e6,
        "ttft_p50_ms": percentile(first, 50),
        "ttft_p95_ms": percentile(first, 95),
        "itl_p50_ms": percentile(gaps, 50),
        "itl_p99_ms": percentile(gaps, 99),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, between two values linearly, as numpy and the other clients do."""
    ordered, place = sorted(values), (len(values) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def incomplete(streams: Sequence[Mapping[str, Any]], pp: int, tg: int) -> Iterator[str]:
    """Yield why streams are not whole answers to what was asked."""
    for number, each in enumerate(streams):
        count, end = sum(each.get("tokens", ())), each.get("end") or {}
        if each["status"] != 200:
            yield f"stream {number}: HTTP {each['status'] or 'without a status'}: {each.get('problem', '')}"
        elif "problem" in each:
            yield f"stream {number}: {each['problem']}"
        elif each.get("stalled"):
            yield f"stream {number} stalled after {count} tokens: nothing arrived for stall_s"
        elif "prompt" not in end:
            yield f"stream {number} was cut after {count} of {tg} tokens"
        elif count != tg:
            yield f"stream {number} got {count} tokens, not {tg}: it was stopped by {end.get('stop')}"
        elif end["prompt"] != pp:
            computed = f"{end['prompt']} tokens of its prompt were computed and {end['cached']} came from a cache"
            yield f"stream {number}: {computed}, of {pp}"


def unfair(streams: Sequence[Mapping[str, Any]], *, at_once: bool = True) -> Iterator[str]:
    """Yield why the times of whole answers are not the server's; raises Refused as `steady` does."""
    gaps = _gaps(streams)
    close = TOGETHER * median(gaps)
    if (together := sum(us <= close for us in gaps) / len(gaps)) > BUNCHED:
        yield f"{together:.0%} of the events arrived with the one before: something between server and client collects"
    if at_once:
        yield from _slow(steady(streams))
        slots = [each["end"].get("slot", number) for number, each in enumerate(streams)]
        if slots != list(range(len(streams))):
            yield "the server did not decode the streams in slots 0 to B-1, as it was asked to"
    behind = percentile([each.get("behind_us", 0) for each in streams], 95)
    if behind > BEHIND * median([each["at_us"][0] for each in streams]):
        yield f"the client sent requests {behind / 1e3:.3g} ms late (p95): too much of the time to the first token"
    if abs(share := off(streams) or 0.0) > AGREES:
        yield f"the speed by the client's clock is {100 * share:+.1f} % off the speed that the server reports"


def _slow(speeds: Sequence[float]) -> Iterator[str]:
    if min(speeds) < (1 - UNEQUAL) * median(speeds):
        slow = f"stream {speeds.index(min(speeds))} got {min(speeds):.4g} t/s"
        yield f"{slow}, the median stream {median(speeds):.4g}: they did not share the steps"


def off(streams: Sequence[Mapping[str, Any]]) -> float | None:
    """Return how far the sum of the streams' speeds is from that by the server's own times; None if it tells none."""
    timed = [each for each in streams if each["end"]["ms"]]
    own = sum((sum(each["tokens"]) - 1) / each["end"]["ms"] for each in timed)  # since the first token, not event
    seen = sum(1e3 * sum(each["tokens"][1:]) / sum(each["at_us"][1:]) for each in timed)
    return seen / own - 1 if own else None
