"""Gates that run commands of a tool; each kind is a record in the module of its tool, in `dgxlab.tools`."""

# ruff: noqa: UP013 - a map of few keys is a line

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict, Union

from dgxlab.model.parts import Count, MaybeCount, MaybeText, Name, Texts, Variables

ARM, AGAINST, REFERENCE = "arm", "against", "reference"
"""Roles of a gate's commands: the arm, the arm in another environment, the reference for both."""
SHORT, SHORT_REFERENCE = "short", "short_reference"
"""The arm at a shorter context, and its reference."""

Against = Mapping[str, Union[str, None]]
"""Variables that differ in the other environment; None for a variable that is unset there."""

Readings = Mapping[str, Mapping[str, Any]]
"""By role: the parsed output of a gate's command, or under `problem` why it does not count."""

Launched = TypedDict("Launched", {"role": Name, "argv": list[str], "env": Variables, "rc": Union[int, None]})
Cases = TypedDict(  # of test-backend-ops; `cases` is the digest of their list
    "Cases", {"passed": MaybeCount, "total": MaybeCount, "unsupported": MaybeCount, "failed": Texts, "cases": MaybeText}
)
_Problem = TypedDict("_Problem", {"problem": str})
_Greedy = TypedDict("_Greedy", {"md5": str, "n_prompt": MaybeCount, "n_gen": MaybeCount})
_Tests = TypedDict("_Tests", {"passed": Count, "failed": list[str], "verdict": str})
_Divergence = TypedDict("_Divergence", {"kld": float, "ppl_ratio": float})  # of a model from its reference
_Reference = TypedDict("_Reference", {"ppl": float})
Reading = Union[_Problem, Cases, _Greedy, _Tests, _Divergence, _Reference]
"""Parsed output of one command, or why it does not count."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Base of all kinds. The docstring of a kind is its help in editors."""

    declared: ClassVar[list[type[Check]]] = []
    """Filled by `dgxlab.tools`."""
    name: ClassVar[str] = ""
    """Its key in specs."""
    told_on: ClassVar[str] = "stdout"
    """The stream on which the program reports failed cases."""

    env: Mapping[str, str] = field(default_factory=dict)
    limit_s: float = 1800.0

    if TYPE_CHECKING:

        @property
        def model(self) -> str:
            """The model that the gate reads, "" for none."""

        @property
        def against(self) -> Against:
            """The other environment, {} for none."""

    def subject(self) -> str:
        """Return the name of the tested thing, for people."""
        return self.model

    def roles(self) -> tuple[str, ...]:
        """Return the roles of the gate's commands, in order."""
        return (ARM, AGAINST) if self.against else (ARM,)

    def limits(self) -> tuple[str, ...]:
        """Return the gate's limits for its readings, in words."""
        raise NotImplementedError

    def flaws(self) -> Iterator[str]:
        """Yield why the gate would always pass, or always fail."""
        yield from ()

    def step(self, env: Mapping[str, str], root: str) -> dict[str, Any]:
        """Return `commands` and, where the gate needs them, `text` or `files` of its step; `root` is the project."""
        raise NotImplementedError

    def read(self, role: str, stdout: bytes, stderr: str) -> dict[str, Any]:
        """Parse the output of a role's command; under `problem` why it does not count."""
        raise NotImplementedError

    def judge(self, readings: Readings) -> Iterator[Any]:
        """Yield why the gate did not pass, given the readings of all its commands."""
        raise NotImplementedError

    def shown(self, readings: Readings) -> Iterator[str]:
        """Yield the readings in words."""
        raise NotImplementedError

    def sources(self, files: Mapping[str, str]) -> dict[str, str]:
        """Return digests of the gate's compiled sources by their recorded name, given its files."""
        return {}


def limits(gate: Check) -> tuple[str, ...]:
    """Return a gate's limits, in words."""
    marker = getattr(gate, "engaged", "")
    return (*gate.limits(), *([f"{marker!r} on stderr"] if marker else []))


def environments(gate: Check, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arm's environment and the one to compare it with, given the experiment's own."""
    arm = {**env, **gate.env}
    return arm, {name: value for name, value in {**arm, **gate.against}.items() if value is not None}
