"""Base of the gates that run commands of a tool and judge their output; each kind is a class in its tool's module.

A role names one of the commands (ARM, AGAINST or REFERENCE in `model.plan`). A reading is what the gate parsed from the
output of one command.
"""

# ruff: noqa: UP013 - a map of few keys is a line

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Union

from dgxlab.model.parts import Count, MaybeCount, MaybeText, Name, Texts, Variables

ARM, AGAINST, REFERENCE = "arm", "against", "reference"
"""Roles of a gate's commands: the arm, the arm in another environment, the reference for both."""
SHORT, SHORT_REFERENCE = "short", "short_reference"  # the arm at a shorter context, and its reference
Against = Mapping[str, Union[str, None]]  # environment variables that a gate's AGAINST command changes; None unsets one

Readings = Mapping[str, Mapping[str, Any]]
"""The reading of each command by its role; {"problem": why} if its output cannot be used."""

Launched = TypedDict("Launched", {"role": Name, "argv": list[str], "env": Variables, "rc": Union[int, None]})
Cases = TypedDict(  # of test-backend-ops; `cases` is the digest of their list
    "Cases", {"passed": MaybeCount, "total": MaybeCount, "unsupported": MaybeCount, "failed": Texts, "cases": MaybeText}
)
_Problem = TypedDict("_Problem", {"problem": str})
_Greedy = TypedDict("_Greedy", {"md5": str, "n_prompt": MaybeCount, "n_gen": MaybeCount})
_Tests = TypedDict("_Tests", {"passed": Count, "failed": list[str], "verdict": str})
_Divergence = TypedDict("_Divergence", {"kld": float, "ppl_ratio": float})  # of a model from its reference
_Reference = TypedDict("_Reference", {"ppl": float})
CommandReading = Union[_Problem, Cases, _Greedy, _Tests, _Divergence, _Reference]


@dataclass(frozen=True, kw_only=True)
class Check:
    """Base of all kinds of such gates. Fields are keys of a spec; editors show a kind's docstring as its help."""

    declared: ClassVar[list[type[Check]]] = []  # all kinds; `dgxlab.tools` fills the list
    name: ClassVar[str] = ""  # the kind's key in specs
    failures_on: ClassVar[str] = "stdout"  # the stream on which the program reports failed cases

    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0

    if TYPE_CHECKING:

        @property
        def model(self) -> str:
            """The spec's name of the model that the gate reads, "" for none."""

        @property
        def against(self) -> Against:
            """The variables that the AGAINST command changes, {} if the gate has no such command."""

    def subject(self) -> str:
        """Return what the gate tests, for reports: the model, unless a kind overrides this."""
        return self.model

    def roles(self) -> tuple[str, ...]:
        """Return the roles of the gate's commands, in order."""
        return (ARM, AGAINST) if self.against else (ARM,)

    def limits(self) -> tuple[str, ...]:
        """Return what must hold for the gate to pass, in words: `KLD at most 0.01`."""
        raise NotImplementedError

    def flaws(self) -> Iterator[str]:
        """Yield a sentence for each setting with which the gate would always pass, or always fail."""
        yield from ()

    def step(self, env: Mapping[str, str], root: str) -> dict[str, Any]:
        """Return the fields of a `GateStep` that depend on the kind: `commands`, and `text` or `files` if needed.

        `env` is the experiment's environment, `root` the project's folder.
        """
        raise NotImplementedError

    def read(self, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
        """Return the reading of the command with this role, or {"problem": why}.

        `cut` in it means that output is missing: the command is repeated.
        """
        raise NotImplementedError

    def judge(self, readings: Readings) -> Iterator[Any]:
        """Yield a `Reason` for each limit that is not met; all commands must have a reading without a `problem`."""
        raise NotImplementedError

    def shown(self, readings: Readings) -> Iterator[str]:
        """Yield the readings as phrases for reports: `KLD 0.001234`."""
        raise NotImplementedError

    def sources(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return the digest of the source code among `files` (texts by path), by its name in the record."""
        return {}


def environments(gate: Check, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environments of a gate's ARM and AGAINST commands; `env` is the experiment's."""
    arm = {**env, **gate.env}
    return arm, {name: value for name, value in {**arm, **gate.against}.items() if value is not None}
