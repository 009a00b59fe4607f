"""Watches the engine of a command that serves with vLLM. Loads neither torch nor vLLM.

An environment variable turns the plugin of vLLM on, and the engine's processes inherit it. ``served_engine.py`` does
the rest, in the process that has the model.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from attncheck.errors import QuestionError
from attncheck.harness.engine.internals import check_internals
from attncheck.harness.host import run_with_plugin

PLUGIN = "attncheck_engine"
"""Name of the plugin of vLLM that watches."""

VARIABLE = "ATTNCHECK_ENGINE"
"""Environment variable with the settings as JSON; if it is unset, nothing is watched."""


@dataclass(frozen=True)
class WatchSettings:
    """How an engine that serves is watched.

    path: of the run file. judge_every: outputs and pages of every Nth step are judged. follow_one_of: requests
    are followed whose prompts begin with one of M first blocks. command: the words typed, for the header of the run
    file.
    """

    path: Path
    judge_every: int = 16
    follow_one_of: int = 1
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, number in (("every", self.judge_every), ("follow", self.follow_one_of)):
            if number < 1:
                raise QuestionError(f"attncheck engine: --{name} is {number}; give a whole number above 0")

    def environment(self) -> dict[str, str]:
        """Return the settings as an environment variable; the path is absolute, since processes change folders."""
        return {VARIABLE: json.dumps(asdict(self) | {"path": str(self.path.absolute())})}


def settings_of(environment: Mapping[str, str]) -> WatchSettings | None:
    """Return the settings that :meth:`WatchSettings.environment` gave, or None if nothing is to be watched."""
    if not environment.get(VARIABLE):
        return None
    given = json.loads(environment[VARIABLE])
    return WatchSettings(**given | {"path": Path(given["path"]), "command": tuple(given["command"])})


def serve_watched(settings: WatchSettings, command: Sequence[str]) -> int:
    """Run a command that serves with vLLM, watch its engine, and return the command's exit code.

    Raises:
        QuestionError: the command cannot be started, or the vLLM of this environment cannot be watched.
    """
    if find_spec("vllm") is not None:  # else the command has an environment of its own, where the worker checks it
        check_internals()
    return run_with_plugin(command, settings.environment(), PLUGIN)


def register() -> None:
    """Watch the engine of this process if the environment says so; vLLM calls this in each of its processes."""
    settings = settings_of(os.environ)
    if settings is not None:
        import_module("attncheck.harness.engine.served_engine").watch_engine(settings)
