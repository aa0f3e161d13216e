"""dgxlab init, new: a project, an experiment, a series."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from typer import Argument, Option

from dgxlab.cli import _complete
from dgxlab.cli._app import App, find_spec
from dgxlab.cli._out import Out
from dgxlab.errors import UsageError, command
from dgxlab.project import root

app = App("Begin an experiment or a series.")


def init(
    spark: bool = Option(False, "--spark", help="For a DGX Spark that is reached by `ssh dgx`."),
    cuda: bool = Option(False, "--cuda", help="For an NVIDIA GPU of this machine."),
    cpu: bool = Option(False, "--cpu", help="For this machine's processor; the default."),
    *,
    out: Out,
) -> None:
    """Make this folder a project: experiments, hosts, a plan, git.

    Example: dgxlab init --cpu
    """
    from dgxlab.lab import starter

    chosen = [name for name, is_so in (("spark", spark), ("cuda", cuda), ("cpu", cpu)) if is_so]
    if len(chosen) > 1:
        raise UsageError(f"--{' and --'.join(chosen)} exclude one another", next=f"dgxlab init --{chosen[0]}")
    name = "".join(chosen) or "cpu"
    kind = starter.KINDS[name]
    if name == "cuda":
        if arch := starter.compute_capability():
            kind = replace(kind, words={**kind.words, "arch": arch})
        else:
            out.note("no NVIDIA GPU is seen here: set CMAKE_CUDA_ARCHITECTURES in experiments/stock.yaml to yours")
    files = starter.init(Path.cwd(), kind)
    ab = command("dgxlab", "ab", "stock", kind.candidate)
    update = "dgxlab report --update plans/first.md"
    lines = [*files, "", f"first verdict: {ab}", f"its table:     {update}"]
    out.result({"project": str(Path.cwd()), "files": files, "next": [ab, update]}, "\n".join(lines))


@app.add
def experiment(
    name: str = Argument(help="The new experiment's name."),
    extends: str = Option(
        ..., help="What it starts from: a YAML file, or its name in experiments/.", autocompletion=_complete.experiments
    ),
    *,
    out: Out,
) -> None:
    """Write an experiment that extends another one, beside it.

    Example: dgxlab new experiment wider-tiles --extends stock
    """
    from dgxlab.lab import starter
    from dgxlab.spec import load_all

    parent = find_spec(extends)
    load_all(parent)  # an error in it would be reported against the new file
    path = starter.new_experiment(root(), name, parent)
    out.result({"file": str(path)}, f"{path}\nedit it, then: {command('dgxlab', 'plan', name)}")


@app.add
def series(name: str = Argument(help="The new series' name."), *, out: Out) -> None:
    """Make the folder of a patch series, patches/NAME.

    Example: dgxlab new series wider-tiles
    """
    from dgxlab.lab import starter
    from dgxlab.series import first_export

    folder = starter.new_series(root(), name)
    out.result({"folder": str(folder)}, f"{folder}\nits patches: {first_export(name)}")
