"""Events of a journal: codes where older agents told sentences, and the same words for both."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from dgxlab.model import events
from dgxlab.model.events import Flag, GateEvent, RunEvent, flag
from dgxlab.model.reasons import Code, Reason, reason, says_not_engaged
from tests.journals import CAPPED, Journal, plan

UNENGAGED = reason(Code.NOT_ENGAGED, marker="w4a16:", program="llama-bench")


def run(**changes: Any) -> RunEvent:
    """Return a run as an older agent told it."""
    event = events.read(Journal(plan("J")).run(**changes).events[0])
    assert isinstance(event, RunEvent)
    return event


def test_an_older_agents_sentences_are_kept() -> None:
    event = run(status="failed", reason="killed by signal 9", flags=[CAPPED])
    assert event.reason == "killed by signal 9"
    assert [(each.kind, each.reason) for each in event.flags] == [("sw_power_cap", CAPPED["reason"])]


def test_an_older_agents_gates_are_read_as_one_kind() -> None:
    """It told a parity gate's command and counts as fields, and other gates as events of another name."""
    failed, check = (events.read(told) for told in Journal(plan("J")).gate(1102).check(kld=0.1).events)
    assert isinstance(failed, GateEvent)
    assert isinstance(check, GateEvent)
    assert (failed.counts["passed"], failed.counts["total"], failed.counts["cases"]) == (1102, 1103, None)
    assert [(command["role"], command["rc"]) for command in failed.commands] == [("arm", 1)]
    assert [str(reason) for reason in failed.reasons] == ["1102 of 1103 cases passed"]
    assert (check.event, check.status, len(check.reasons), check.inputs.keys()) == ("gate", "failed", 1, {"tiny"})
    for event in (failed, check):
        assert events.read(events.written(event, event.seq)) == replace(event, t=ANY)


def test_codes_travel_with_their_parameters() -> None:
    told = flag(Code.WAITED, hard=True, seconds=90.0)
    event = RunEvent(**{**vars(run()), "status": "discarded", "reasons": (UNENGAGED,), "flags": (told,)})
    value = json.loads(json.dumps(events.written(event, 3)))
    assert value["flags"] == [{"device": "host", "kind": "waited", "hard": True, "params": {"seconds": 90.0}}]
    back = events.read(value)
    assert isinstance(back, RunEvent)
    assert (back.seq, back.reasons, back.flags) == (3, (UNENGAGED,), (told,))
    assert back.hard == (told.reason,)


def test_a_newer_agents_codes_are_named() -> None:
    assert Flag("host", "moonlight", False, {"lux": 3}).reason == "moonlight lux=3"
    assert run(moon="full") == run()
    assert events.read({"seq": 1, "t": 2, "event": "telepathy", "thoughts": []}) == events.Event(seq=1, t=2)


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
    assert says_not_engaged(str(told)) is expected
