"""dgxlab bytes: whether a kernel is so close to the memory bound that a rewrite cannot help."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dgxlab.cli._out import Out
from dgxlab.errors import AGAIN, GateFailed, UsageError

if TYPE_CHECKING:
    from dgxlab.traffic import Decision


def bytes_(
    kernel: Annotated[str, typer.Argument(help="An operation, as gated_delta_net or mul_mat.", show_default=False)],
    given: Annotated[
        list[str] | None,
        typer.Option("--given", "-g", help="NAME=VALUE that was read or measured; us and peak (GB/s) too."),
    ] = None,
    assume: Annotated[list[str] | None, typer.Option("--assume", help="NAME=VALUE that is only believed.")] = None,
    model: Annotated[Path | None, typer.Option("--model", help="A GGUF file: its geometry counts as given.")] = None,
    gain: Annotated[float, typer.Option("--gain", help="The factor that a rewrite must be able to win.")] = 1.2,
    *,
    out: Out,
) -> None:
    """Show the largest possible gain from rewriting a kernel.

    The floor is the time for its minimum traffic at peak memory bandwidth. The verdict is "build" if the measured time
    is at least --gain times the floor and every input is given; "not worth it" if it is less; "unknown" if that
    depends on an assumption. The exit code is 5 unless the verdict is "build".

    Example: dgxlab bytes copy -g values=1e8 -g type=F32 -g us=4000 -g peak=273
    """
    from dgxlab import gguf_header, traffic

    known: dict[str, traffic.Input] = {}
    if model:
        header = gguf_header.read(model)
        for owner, name, value in traffic.of_model(header):
            if owner == kernel:
                known[name] = traffic.Input(value, True, model.name)
    # what is given replaces an assumption
    for pairs, observed, origin in ((assume, False, "assumed"), (given, True, "given")):
        for pair in pairs or ():
            name, equals, text = pair.partition("=")
            if not (name and equals and text):
                raise UsageError(f"{pair!r} is not NAME=VALUE", next="dgxlab bytes --help")
            known[name] = traffic.Input(text, observed, origin)
    decision = traffic.decide(kernel, known, gain=gain)
    out.result(decision, lambda: _text(decision))
    if decision.verdict == "unknown":
        message = f"whether a rewrite of {kernel} can win {gain:g}x is unknown: {', '.join(decision.assumed)} must be"
        options = " ".join(f"--given {name}={decision.inputs[name].value}" for name in decision.assumed)
        raise GateFailed(f"{message} read or measured, not assumed", next=f"{AGAIN} with {options}")
    if decision.verdict != "build":
        message = f"a rewrite of {kernel} is {decision.verdict}: it can win {decision.cap:.2f}x at most, not {gain:g}x"
        raise GateFailed(message, next="dgxlab report --form profile")  # another kernel may take more of the time


def _text(decision: Decision) -> str:
    parts = ", ".join(f"{name} {part / 1e6:.1f}" for name, part in decision.parts.items())
    inputs = ", ".join(
        f"{name} {each.value}" + ("" if each.observed else f" ({each.origin})")
        for name, each in decision.inputs.items()
    )
    return f"""{decision.kernel}: {decision.verdict}
bytes   {decision.bytes_min / 1e6:.1f} MB: {parts}
floor   {decision.floor_us:.4g} us at the peak
now     {decision.gb_s:.4g} GB/s, {decision.share:.0%} of the peak
cap     {decision.cap:.2f}x at most, {decision.gain:g}x wanted
inputs  {inputs}
"""
