"""``[tool.attncheck]`` of pyproject.toml: what ``attncheck run`` does where the command line leaves an option out.

Loads no torch.
"""

import os
import re
import tomllib
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, ValidationError

from attncheck.errors import CaseFileError

TABLE = "tool.attncheck"
KEEP = 50
"""Run files that are kept in a folder."""

_PATH = re.compile(r"(?P<before>vllm:)?(?P<path>[^{]+\.(?:py|ya?ml))(?P<after>[:{].*)?")
"""A backend or a suite that is named by its file."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""One text or a list of texts."""


class Config(BaseModel):
    """The keys of the table, each as the option of that name; ``suites``: of ``--suite``, and so on.

    ``settings``: as ``--set``, a list of ``KEY=VALUE``. ``output``: the folder of run files. ``keep``: how many runs
    are kept there. ``cache``: false as ``--no-cache``. ``path``: the file they are from, or None.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    suites: Names = ()
    backends: Names = ()
    checks: Names = ()
    skip: Names = ()
    settings: Names = ()
    expect: Path | None = None
    device: str | None = None
    seed: Annotated[int, Field(ge=0, strict=True)] | None = None
    case_timeout: Annotated[float, Field(ge=0)] | None = None
    backend_timeout: Annotated[float, Field(ge=0)] | None = None
    memory_limit: ByteSize | None = None
    device_memory_limit: ByteSize | None = None
    pass_env: Names = ()
    output: Path | None = None
    keep: Annotated[int, Field(ge=1, strict=True)] = KEEP
    cache: Annotated[bool, Field(strict=True)] = True

    _path: Path | None = None

    @property
    def note(self) -> str:
        """The note of a run that names the file of its options; empty if there is no file."""
        if self._path is None:
            return ""
        given = ", ".join(f"{name} = {_shown(getattr(self, name))}" for name in sorted(self.model_fields_set))
        return f"options not given on the command line are from {self._path}: {given or 'none'}"


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def read_config(start: Path) -> Config:
    """Return the table of the nearest pyproject.toml that has one, from the folder ``start`` upwards.

    Paths in it are relative to its folder; they are returned relative to the current folder.

    Raises:
        CaseFileError: the file is no TOML, or has an unknown key or a wrong value.
    """
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and (table := _table(path)) is not None:
            return _config(Path(os.path.relpath(path)), table)
    return Config()


def _table(path: Path) -> dict[str, Any] | None:
    """Return the table of this file, or None if it has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if "attncheck" not in text:
        return None
    try:
        table = tomllib.loads(text).get("tool", {}).get("attncheck")
    except tomllib.TOMLDecodeError as error:
        raise CaseFileError(f"is not TOML: {error}", file=str(path)) from error
    return table if isinstance(table, dict) else None


def _config(path: Path, table: dict[str, Any]) -> Config:
    try:
        config = Config.model_validate(table)
    except ValidationError as error:
        raise _wrong(path, error) from error
    folder = path.parent
    config = config.model_copy(
        update={
            "suites": tuple(_from(folder, name) for name in config.suites),
            "backends": tuple(_from(folder, name) for name in config.backends),
            "expect": config.expect and folder / config.expect,
            "output": config.output and folder / config.output,
        }
    )
    config._path = path
    return config


def _from(folder: Path, name: str) -> str:
    """``name`` where it stands for a file, relative to the current folder; any other as it is."""
    match = _PATH.fullmatch(name)
    if match is None or folder == Path() or Path(match["path"]).is_absolute():
        return name
    return f"{match['before'] or ''}{folder / match['path']}{match['after'] or ''}"


def _wrong(path: Path, error: ValidationError) -> CaseFileError:
    """The first fault that pydantic found, as our own error."""
    first = error.errors(include_url=False, include_context=False)[0]
    key, *_ = first["loc"]
    known = list(Config.model_fields)
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(key), known, n=1)
        allowed = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return CaseFileError("unknown key", file=str(path), key=f"{TABLE}.{key}", allowed=allowed)
    return CaseFileError(first["msg"], file=str(path), key=f"{TABLE}.{key}", value=first["input"])
