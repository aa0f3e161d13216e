"""Events of a journal: codes where older agents told sentences, and the same words for both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dgxlab.model import events
from dgxlab.model.events import Flag, RunEvent, flag
from dgxlab.model.reasons import Code, Reason, reason
from tests.journals import CAPPED, Journal, plan

UNENGAGED = reason(Code.NOT_ENGAGED, marker="w4a16:", program="llama-bench")


def run(**changes: Any) -> RunEvent:
    """Return a run as an older agent told it."""
    event = events.read(Journal(plan("J")).run(**changes).events[0])
    assert isinstance(event, RunEvent)
    return event


def test_an_older_agents_sentences_are_kept() -> None:
    """As parameters of codes, so that every reader asks for words in one way."""
    event = run(status="failed", reason="killed by signal 9", flags=[CAPPED])
    assert event.reason == "killed by signal 9"
    assert [(each.kind, each.reason) for each in event.flags] == [("sw_power_cap", CAPPED["reason"])]


def test_codes_travel_with_their_parameters() -> None:
    """The journal has no sentence of them."""
    told = flag(Code.WAITED, hard=True, seconds=90.0)
    event = RunEvent(**{**vars(run()), "status": "discarded", "reasons": (UNENGAGED,), "flags": (told,)})
    value = json.loads(json.dumps(events.written(event, 3)))
    assert value["flags"] == [{"device": "host", "kind": "waited", "hard": True, "params": {"seconds": 90.0}}]
    back = events.read(value)
    assert isinstance(back, RunEvent)
    assert (back.seq, back.reasons, back.flags) == (3, (UNENGAGED,), (told,))
    assert back.hard == ("the device had to be waited for, 1 min 30 s, right before it",)


def test_a_newer_agents_codes_are_named() -> None:
    """With what is known of them; fields that are not known are left out."""
    assert Flag("host", "moonlight", False, {"lux": 3}).reason == "moonlight lux=3"
    assert run(moon="full") == run()
    assert events.read({"seq": 1, "t": 2, "event": "telepathy", "thoughts": []}) == events.Event(seq=1, t=2)


@pytest.mark.parametrize(
    ("code", "params", "words"),
    [
        (
            Code.RUN_QUEUE,
            {"threads": 1, "processors": 16, "waited": 0.1, "others": 0.5},
            "its 1 thread on 16 processors waited 0.10 s a second for their turn; others used 0.50 processors",
        ),
        (
            Code.OTHERS_CPU,
            {"threads": 12, "processors": 16, "others": 4.25},
            "others used 4.25 processors beside its 12 threads on 16 processors",
        ),
        (Code.STEAL, {"share": 0.05}, "the hypervisor gave 5.0 % of the processors' time to other machines"),
        (Code.PSI, {"share": 0.101}, "a program on the host waited for a processor 10 % of the time"),
    ],
)
def test_numbers_in_words(code: Code, params: dict[str, Any], words: str) -> None:
    """Of the flags about the processors."""
    assert flag(code, hard=True, **params).reason == words


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (UNENGAGED, True),
        (Reason("told", {"words": str(UNENGAGED)}), True),
        (Reason("told", {"words": f"a foreign compute process appeared; {UNENGAGED}"}), False),
        (reason(Code.ENGAGED_TOO, marker="w4a16:", program="llama-bench"), False),
    ],
)
def test_whether_the_path_under_test_ran(told: Reason, expected: bool) -> None:
    """A code says it, and so does an older agent's sentence that begins with it."""
    assert told.not_engaged is expected
