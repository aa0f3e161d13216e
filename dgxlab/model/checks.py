"""Gates that run commands of a tool; each kind is a record in the module of its tool, in `dgxlab.tools`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Union

from dgxlab.model.wire import from_json

Against = Mapping[str, Union[str, None]]
"""Variables that differ in the other environment; None for a variable that is unset there."""

Readings = Mapping[str, Mapping[str, Any]]
"""By role: the parsed output of a gate's command, or under `problem` why it does not count."""


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

    def limits(self) -> tuple[str, ...]:
        """Return the gate's limits for its readings, in words."""
        raise NotImplementedError

    def flaws(self) -> Iterator[str]:
        """Yield why the gate would always pass, or always fail."""
        yield from ()

    def step(self, env: Mapping[str, str], root: str) -> dict[str, Any]:
        """Return `commands` and, where the gate needs them, `text` or `files` of its step.

        Args:
            env: The experiment's environment.
            root: The project's folder.
        """
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


def check_from_json(value: Any) -> Check:
    """Decode a gate; raises ValueError if it is not one."""
    return from_json(Check, value)


def limits(gate: Check) -> tuple[str, ...]:
    """Return a gate's limits, in words."""
    marker = getattr(gate, "engaged", "")
    return (*gate.limits(), *([f"{marker!r} on stderr"] if marker else []))


def environments(gate: Check, env: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the arm's environment and the one to compare it with, given the experiment's own."""
    arm = {**env, **gate.env}
    return arm, {name: value for name, value in {**arm, **gate.against}.items() if value is not None}
