"""Watches the engine of a command that serves with vLLM. Loads neither torch nor vLLM.

An environment variable turns the plugin of vLLM on, and the engine's processes inherit it. ``served_engine.py`` does
the rest, in the process that has the model.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from pydantic import BaseModel

PLUGIN = "attncheck_engine"
"""Name of the plugin of vLLM that watches."""

VARIABLE = "ATTNCHECK_ENGINE"
"""Environment variable with the settings as JSON; if it is unset, nothing is watched."""


class WatchSettings(BaseModel, frozen=True):
    """How an engine that serves is watched.

    path: of the run file, absolute, since processes change folders. judge_every: outputs and pages of every Nth step
    are judged. follow_one_of: requests are followed whose prompts begin with one of M first blocks. command: the words
    typed, for the header of the run file.
    """

    path: Path
    judge_every: int = 16
    follow_one_of: int = 1
    command: tuple[str, ...] = ()

    def environment(self) -> Mapping[str, str]:
        """Return the settings as an environment variable."""
        return {VARIABLE: self.model_dump_json()}


def register() -> None:
    """Watch the engine of this process if the environment says so; vLLM calls this in each of its processes."""
    if settings := os.environ.get(VARIABLE):
        served_engine = import_module("attncheck.harness.engine.served_engine")
        served_engine.watch_engine(WatchSettings.model_validate_json(settings))
