"""The commands of gates beside test-backend-ops: greedy text, perplexity against a reference, a kernel's own tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dgxlab.errors import SpecError, command
from dgxlab.model import (
    AGAINST,
    ARM,
    REFERENCE,
    Check,
    CheckCommand,
    CheckStep,
    CheckText,
    Experiment,
    GreedyGate,
    HarnessGate,
    PerplexityGate,
    environments,
)

PROGRAMS: Mapping[type, str] = {GreedyGate: "llama-completion", PerplexityGate: "llama-perplexity"}

N_BATCH = 2048
"""The tools' own logical batch size, which n_ubatch may exceed."""

ON_DEVICE = ("-ngl", "99", "-fit", "off")
"""All layers on the GPU: what the tools choose by themselves depends on how much of its memory is free."""

ON_PROCESSOR = ("--device", "none", "-fit", "off")
"""A GPU's F32 products are TF32, which is no reference."""


def models_of(gate: Check) -> tuple[str, ...]:
    """Return the names of the models that a gate reads."""
    return tuple(filter(None, (gate.model, gate.reference if isinstance(gate, PerplexityGate) else "")))


def kernel_files(root: str, kernel: str) -> dict[str, str]:
    """Return a kernel's sources by path below kernels/, with what all kernels share; no folder below theirs but ladder.

    Raises:
        SpecError: if there is no such kernel, or a file of it is no text.
    """
    home = Path(root) / "kernels"
    if not (home / kernel / "Makefile").is_file():
        raise SpecError(f"there is no kernel {kernel}: {home / kernel} has no Makefile", next=command("ls", home))
    folders = (home, home / "common", home / kernel, home / kernel / "ladder")
    found = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    files = [path for path in found if path.is_file() and path.suffix != ".md" and not path.name.startswith(".")]
    return {str(path.relative_to(home)): _text(path) for path in sorted(files)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is no text, as a kernel's sources are", next=command("ls", "-l", path)) from error


def check_step(step: str, arm: str, gate: Check, experiment: Experiment) -> CheckStep:
    """Return the step of an experiment's gate.

    Raises:
        SpecError: if the kernel that it tests is not there.
    """
    env = experiment.env
    if isinstance(gate, HarnessGate):
        files = kernel_files(experiment.root, gate.kernel)
        argv = ("make", "-C", f"{{files}}/{gate.kernel}", "test", f"ARCH={gate.arch}", "OUT={files}/build")
        commands = (CheckCommand(ARM, argv, environments(gate, env)[0]),)
        return CheckStep(step, arm, gate, commands, files=files, limit_s=gate.limit_s)
    if isinstance(gate, GreedyGate):
        return CheckStep(step, arm, gate, _greedy(gate, env), CheckText(gate.n_prompt, gate.seed), limit_s=gate.limit_s)
    # no word is less than a token, and the tool wants text for two chunks even where it computes one
    words = CheckText(max(2, gate.chunks) * gate.n_ctx, gate.seed)
    return CheckStep(step, arm, gate, _perplexity(gate, env), words, limit_s=gate.limit_s)


def _greedy(gate: GreedyGate, env: Mapping[str, str]) -> tuple[CheckCommand, ...]:
    # room for words that are two tokens; it is part of the command, because the cache's size chooses kernels
    context = 2 * gate.n_prompt + gate.n_gen + 64
    sizes = {"-n": gate.n_gen, "-c": context, "-b": max(N_BATCH, gate.n_ubatch), "-ub": gate.n_ubatch}
    asked = ("-f", "{text}", "-no-cnv", "--no-display-prompt", "--ignore-eos", "--temp", "0", "--seed", "0")
    return _both(gate, env, _argv(gate, gate.model, (*asked, *_flags(sizes), *ON_DEVICE)))


def _perplexity(gate: PerplexityGate, env: Mapping[str, str]) -> tuple[CheckCommand, ...]:
    # whole chunks in a batch, which the tool demands
    batch = max(1, gate.n_ubatch // gate.n_ctx) * gate.n_ctx
    sizes = _flags({"-c": gate.n_ctx, "-b": batch, "-ub": gate.n_ubatch})
    logits = ("--kl-divergence-base", "{logits}")
    of_reference = ("-f", "{text}", "--chunks", str(gate.chunks), *logits, *sizes, *ON_PROCESSOR)
    compared = ("--kl-divergence", *logits, *sizes, *ON_DEVICE)
    _, other = environments(gate, env)
    reference = CheckCommand(REFERENCE, _argv(gate, gate.reference, of_reference), other, gate.reference)
    return (reference, *_both(gate, env, _argv(gate, gate.model, compared)))


def _both(gate: Check, env: Mapping[str, str], argv: tuple[str, ...]) -> tuple[CheckCommand, ...]:
    """Return the same command in the arm's environment and, where there is one, in the other."""
    arm, other = environments(gate, env)
    found = [CheckCommand(ARM, argv, arm, gate.model)]
    return (*found, CheckCommand(AGAINST, argv, other, gate.model)) if gate.against else tuple(found)


def _argv(gate: Check, name: str, rest: Sequence[str]) -> tuple[str, ...]:
    return (f"{{bin}}/{PROGRAMS[type(gate)]}", "-m", f"{{model:{name}}}", *rest)


def _flags(values: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(word for flag, value in values.items() for word in (flag, str(value)))
