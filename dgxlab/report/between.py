"""What a session compares: the differences between its arms, as its plan alone says them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dgxlab.compare import Difference, differing
from dgxlab.model import Arm, ChainStep, ModelStep, Plan
from dgxlab.plan import is_flag


def differences(plan: Plan) -> Iterator[Difference]:
    """Yield in what the candidate's arm differs from the baseline's; nothing for an arm that is compared with itself.

    A plan holds more than the experiments' own differences: a series of the same name may have other patches.
    """
    chain = next(plan.chains)
    one, two = plan.arm(chain.baseline.arm), plan.arm(chain.candidate.arm)
    yield from differing("pin", {"": one.source.pin[:12]}, {"": two.source.pin[:12]})
    yield from differing("series", {"": _series(one)}, {"": _series(two)})
    yield from differing("cmake", one.cmake, two.cmake)
    yield from differing("env", one.env, two.env)
    yield from differing("models", _models(plan, one), _models(plan, two))
    for each in plan.chains:
        yield from _of_runs(each, one, two)


def _of_runs(chain: ChainStep, one: Arm, two: Arm) -> Iterator[Difference]:
    """Yield what differs in how a chain's programs are called, beyond what the arms say already."""
    name = f"{chain.id} {chain.baseline.tool}"
    before = {key: value for key, value in chain.baseline.env.items() if one.env.get(key) != value}
    after = {key: value for key, value in chain.candidate.env.items() if two.env.get(key) != value}
    yield from differing("env", before, after, name)
    flags, others = _flags(chain.baseline.argv), _flags(chain.candidate.argv)
    mine = " ".join(flag for flag in flags if flag not in others)
    theirs = " ".join(flag for flag in others if flag not in flags)
    yield from differing("arguments", {name: mine}, {name: theirs})


def _series(arm: Arm) -> str:
    return ", ".join(f"{ref.name}@{ref.digest[:12]}" for ref in arm.source.series)


def _models(plan: Plan, arm: Arm) -> dict[str, str]:
    return {step.model: step.path for step in plan.steps if isinstance(step, ModelStep) and step.arm == arm.name}


def _flags(argv: Sequence[str]) -> list[str]:
    """Return a program's arguments, each flag with its values; its own path is no argument."""
    found: list[str] = []
    for word in argv[1:]:
        if is_flag(word) or not found:
            found.append(word)
        else:
            found[-1] += f" {word}"
    return found
