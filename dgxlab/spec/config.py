"""config.yaml in the user's own configuration folder: what happens when a job ends. A project cannot set it."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, TypeAdapter

from dgxlab.spec.fields import Few, Line, Strict
from dgxlab.spec.yaml_file import read_settings


class Config(Strict):
    """The keys of config.yaml."""

    on_end: Few[Line] = Field(default_factory=list)
    """A command to run when a job has ended, as a list of words: no shell reads it."""
    bell: bool = False
    """Ring the terminal's bell when a job has ended."""


def load_config(path: Path) -> Config:
    """Return the settings in a config.yaml; raises SpecError if it is wrong."""
    config, _ = read_settings(path, TypeAdapter(Config))
    return config
