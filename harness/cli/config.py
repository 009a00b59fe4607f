"""Reads ``[tool.attncheck]`` of pyproject.toml: values for options that the command line omits. Loads no torch."""

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
"""Default number of run files kept in a folder."""

_PATH = re.compile(r"(?P<before>vllm:)?(?P<path>[^{]+\.(?:py|ya?ml))(?P<after>[:{].*)?")
"""A backend or a suite given as the path of a file."""


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""A string or a list of strings."""


class Config(BaseModel):
    """The keys of the table. Each corresponds to the option of the same name, such as ``suites`` to ``--suite``.

    ``settings``: as ``--set``, a list of ``KEY=VALUE``. ``cache``: False has the effect of ``--no-cache``.
    ``output``: the folder of run files, of which the newest ``keep`` are kept.
    ``_path``: the file that the keys were read from, or None.
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
        """The note in a run's header that names this file; empty if there is no file."""
        if self._path is None:
            return ""
        given = ", ".join(f"{name} = {_shown(getattr(self, name))}" for name in sorted(self.model_fields_set))
        return f"options not given on the command line are from {self._path}: {given or 'none'}"


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, tuple) else str(value)


def read_config(start: Path) -> Config:
    """Return the table of the nearest pyproject.toml that has one, searching from folder ``start`` upwards.

    Paths in the table are relative to its file; they are returned relative to the current folder.

    Raises:
        CaseFileError: the file is not valid TOML, or has an unknown key or an invalid value.
    """
    for folder in (start, *start.parents):
        path = folder / "pyproject.toml"
        if path.is_file() and (table := _table(path)) is not None:
            return _config(Path(os.path.relpath(path)), table)
    return Config()


def _table(path: Path) -> dict[str, Any] | None:
    """Return the table of this file, or None if there is none or the file cannot be read."""
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
    """Return ``name`` with its path, if it has one, made relative to the current folder."""
    match = _PATH.fullmatch(name)
    if match is None or folder == Path() or Path(match["path"]).is_absolute():
        return name
    return f"{match['before'] or ''}{folder / match['path']}{match['after'] or ''}"


def _wrong(path: Path, error: ValidationError) -> CaseFileError:
    first = error.errors(include_url=False, include_context=False)[0]
    key, *_ = first["loc"]
    known = list(Config.model_fields)
    if first["type"] == "extra_forbidden":
        near = get_close_matches(str(key), known, n=1)
        allowed = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
        return CaseFileError("unknown key", file=str(path), key=f"{TABLE}.{key}", allowed=allowed)
    return CaseFileError(first["msg"], file=str(path), key=f"{TABLE}.{key}", value=first["input"])
