"""config.yaml in the user's own configuration folder: what happens when a job ends. A project cannot set it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from dgxlab.errors import SpecError, edit
from dgxlab.spec.fields import Few, Line, Strict
from dgxlab.spec.nodes import explain, plain, refuse
from dgxlab.spec.yaml_file import read_file


class Config(Strict):
    """The keys of config.yaml."""

    on_end: Few[Line] = Field(default_factory=list)
    """A command to run when a job has ended, as a list of words: no shell reads it."""
    bell: bool = False
    """Ring the terminal's bell when a job has ended."""


def load_config(path: Path) -> Config:
    """Return the settings in a config.yaml; the defaults if there is no file. Raises SpecError if it is wrong."""
    if not path.exists():
        return Config()
    try:
        tree = read_file(path, str(path), may_be_empty=True)
        try:
            return Config.model_validate(plain(tree))
        except ValidationError as error:
            refuse(explain(error, tree, Config.model_json_schema()))
    except SpecError as error:
        error.next = edit(path)
        raise
