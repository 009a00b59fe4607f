"""Settings of a recording, passed to an engine's processes as environment variables."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from attncheck.errors import QuestionError

FILE = "ATTNCHECK_RECORD"
"""Variable with the path of the file to write; if it is unset, nothing is recorded."""

EVERY = "ATTNCHECK_RECORD_EVERY"
CASES = "ATTNCHECK_RECORD_CASES"

DEFAULT_CASES = 100


@dataclass(frozen=True)
class RecordingSettings:
    """``every``: count at most one in this many batches. ``most_cases``: maximum distinct batches in the file."""

    path: Path
    every: int = 1
    most_cases: int = DEFAULT_CASES

    def __post_init__(self) -> None:
        for name, number in (("every", self.every), ("cases", self.most_cases)):
            if number < 1:
                raise QuestionError(f"recording: {name} is {number}; give a whole number above 0")

    def environment(self) -> dict[str, str]:
        """Return the settings as environment variables; the path is absolute, since processes change folders."""
        return {FILE: str(self.path.absolute()), EVERY: str(self.every), CASES: str(self.most_cases)}


def settings_of(environment: Mapping[str, str]) -> RecordingSettings | None:
    """Return the settings in these variables, or None if they request no recording.

    Raises:
        QuestionError: a number is not a whole number above 0.
    """
    if not environment.get(FILE):
        return None
    numbers = {}
    for name, default in ((EVERY, "1"), (CASES, str(DEFAULT_CASES))):
        text = environment.get(name, default)
        if not text.isdecimal():
            raise QuestionError(f"{name} is {text!r}; give a whole number above 0")
        numbers[name] = int(text)
    return RecordingSettings(Path(environment[FILE]), numbers[EVERY], numbers[CASES])
