"""A small part of the campaign: after each kind of fault everything holds, and the fault met what it is for."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from faults.campaign import trials
from faults.fault import Fault
from faults.kinds import agent, clock, disk, io, network, reboot, root, slurm
from faults.kinds.canary import CANARY
from faults.kinds.client import CLIENT_KILLED
from faults.kinds.commit import COMMIT
from faults.kinds.crowd import CROWD
from faults.kinds.fuzz import FUZZ
from faults.kinds.mutants import MUTANTS
from faults.kinds.raw import RAW
from faults.kinds.sshd import SSHD
from faults.kinds.trust import UNTRUSTED
from faults.kinds.versions import VERSIONS
from faults.kinds.yaml import YAML

Met = Counter[str]
Case = tuple[Fault[Any], int, Iterable[int], Callable[[Met], object]]


def some(word: str) -> Callable[[Met], bool]:
    return lambda met: any(word in each for each in met)


def words(separator: str, *expected: str) -> Callable[[Met], bool]:
    return lambda met: {word.split(separator)[0] for word in met} == {*expected}


def each(more_than: int, *expected: str) -> Callable[[Met], bool]:
    return lambda met: min(met[word] for word in expected) > more_than


CASES: tuple[Case, ...] = (
    (agent.KILLED, 17, range(3), words(" ", "agent", "child", "all")),
    (CANARY, 1, range(20), each(0, "quoted", "refused", "planned", "ran")),
    (clock.SET, 3, range(2), some("in the journal")),
    (COMMIT, 1, range(6), each(0, "commit", "migration")),
    (CROWD, 1, [1], bool),
    (disk.HOST, 3, range(2), each(0, "submit failed")),
    (disk.CLIENT, 3, range(2), bool),
    (FUZZ, 1, range(2000), each(100, "exact", "in part", "refused")),
    (io.RECORD, 2, range(6), some("refused")),
    (MUTANTS, 1, range(60), each(2, "refused", "read")),
    (RAW, 1, range(8), words(" ", "ingest", "fetch", "kept")),
    (reboot.REBOOT, 7, range(2), words(",", "sshd", "power")),
    (root.ROOT, 1, range(3), some("refused")),
    (VERSIONS, 17, [0], bool),
    (YAML, 1, range(300), lambda met: met["read"] > 0 and met["refused"] > 250),
    (CLIENT_KILLED, 1, range(3), lambda met: met["after"] < 3),
    (io.AGENT, 2, range(3), bool),
    (network.RESET, 1, range(3), lambda met: met["after"] < 3),
    (network.BLACKHOLE, 1, [2], lambda met: met["after"] == 0),
    (SSHD, 1, [7], some("connection dropped")),
    (slurm.SLURM, 1, range(3), bool),
    (UNTRUSTED, 1, range(3), lambda met: len(met) > 1),
)


@pytest.mark.parametrize(
    ("fault", "seed", "numbers", "expected"),
    [pytest.param(*case, id=case[0].name, marks=[pytest.mark.slurm] * (case[0] is slurm.SLURM)) for case in CASES],
)
def test_everything_holds(
    fault: Fault[Any],
    seed: int,
    numbers: Iterable[int],
    expected: Callable[[Met], object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "LONGEST_S", 4.0)  # the transport's own tests have a silence of a minute
    tally = trials(fault, seed, numbers)
    assert tally.failures == []
    assert expected(tally.met), tally.met
