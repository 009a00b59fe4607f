"""Options of commands that run backends: their parameters for typer, and the table ``[tool.attncheck]``.

``harness/run/options.py`` declares each option. Loads neither torch nor pydantic before a value is read.
"""

import functools
import inspect
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from attncheck.errors import CaseFileError
from attncheck.harness.cli import common
from attncheck.harness.run.options import OPTIONS, Option, RunOptions, kind_of, options_in, read_given, read_size

# Parameters of commands.

Given = dict[str, Any]
"""What a user gives, as text or TOML value, by the name of the field; a field without an entry is not given."""


def _parameter(option: Option) -> Any:
    return typer.Option(
        *option.names,
        metavar=option.metavar,
        help=option.help,
        hidden=option.hidden,
        min=option.least,
        autocompletion=getattr(common, option.complete) if option.complete else None,
        rich_help_panel=option.group,
    )


_BACKENDS = typer.Argument(
    metavar="BACKEND",
    help="Backends: a name, file.py, file.py:NAME of a class or function, module:NAME, vllm:NAME or "
    "hf:OWNER/NAME@VERSION. "
    "Default: all built-in backends.",
    autocompletion=common.backends,
    show_default=False,
)


def with_options(*names: str, **changes: Mapping[str, Any]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Give a command the options of these fields; it gets them as ``given``, its second parameter.

    Backends are given as arguments, too. ``changes``: by name, the ``help`` or ``metavar`` of this command.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        context, _, *own = inspect.signature(command, eval_str=True).parameters.values()
        options = {name: replace(OPTIONS[name], **changes.get(name, {})) for name in names}
        taken = [_keyword(name, kind_of(name), _parameter(option)) for name, option in options.items()]
        if "backends" in names:
            taken.insert(0, _keyword("arguments", list[str], _BACKENDS))

        @functools.wraps(command)
        def taking(**values: Any) -> int:
            from attncheck.harness.workers.process_tree import ending_orphans

            others = {each.name: values.pop(each.name) for each in (context, *own)}
            others[context.name].with_resource(ending_orphans())
            named = [*(values.pop("arguments", None) or ()), *(values.get("backends") or ())]
            values["backends"] = named or None
            given = {name: value for name, value in values.items() if value is not None and value is not False}
            for name in (name for name, value in given.items() if value is True):
                given[name] = not getattr(RunOptions, name)  # --no-cache sets the field to False
            return command(given=given, **others)

        described: Any = taking
        described.__signature__ = inspect.Signature([context, *taken, *own])
        return taking

    return decorate


def _keyword(name: str, kind: Any, described: Any) -> inspect.Parameter:
    is_flag = kind is bool
    annotation: Any = Annotated[bool if is_flag else kind | None, described]
    default = False if is_flag else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def read_options(given: Mapping[str, Any], **fixed: Any) -> RunOptions:
    """Return the options that are ``given``, and the values of the fields ``fixed``.

    Raises:
        QuestionError: one of them is invalid, or options exclude each other.
    """
    return RunOptions(**{name: read_given(name, value) for name, value in given.items()} | fixed)


# Reads `[tool.attncheck]` of pyproject.toml: values for options that the command line omits.

TABLE = "tool.attncheck"
KEYS = {OPTIONS[name].key or name: name for name in options_in("table")}
"""The field of each key of the table, such as ``suites``."""

_PATH = re.compile(r"(?P<before>vllm:)?(?P<path>[^{]+\.(?:py|ya?ml))(?P<after>[:{].*)?")
"""A backend or a suite given as the path of a file."""


@dataclass(frozen=True)
class Config:
    """The values of the table, by field, as if the user had typed them; ``path``: its file, or None without any."""

    given: Given = field(default_factory=dict)
    path: Path | None = None

    @property
    def note(self) -> str:
        """The note in a run's header that names this file; empty if there is no file."""
        if self.path is None:
            return ""
        keys = {name: key for key, name in KEYS.items()}
        given = ", ".join(f"{keys[name]} = {_shown(value)}" for name, value in sorted(self.given.items()))
        return f"options not given on the command line are from {self.path}: {given or 'none'}"

    def completed(self, given: Given) -> Given:
        """Return what is ``given``, and what the table adds to it."""
        left_out = set()
        if "providers" in given:  # the backends of the table are not meant, nor are their checks
            left_out |= {"backends"} if "backends" in given else {"backends", "checks", "skip"}
        if "checks" in given:
            left_out.add("skip")
        return {name: value for name, value in self.given.items() if name not in left_out} | given


def _shown(value: object) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)


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
    given = {}
    for key, value in table.items():
        if key not in KEYS:
            near = get_close_matches(key, KEYS, n=1)
            allowed = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(KEYS)}"
            raise CaseFileError("unknown key", file=str(path), key=f"{TABLE}.{key}", allowed=allowed)
        given[KEYS[key]] = _value(path, key, value)
    for name in given.keys() & {"suites", "backends"}:
        given[name] = [_from(path.parent, each) for each in given[name]]
    for name in given.keys() & {"expect", "folder"}:
        given[name] = path.parent / given[name]
    return Config(given, path)


def _value(path: Path, key: str, value: Any) -> Any:
    """Return the value of a key, with a list of one for a string where several are allowed.

    Raises:
        CaseFileError: the value has another type, or is too small.
    """
    from pydantic import Field, TypeAdapter, ValidationError

    option = OPTIONS[KEYS[key]]
    kind = kind_of(KEYS[key])
    typed: Any = str | int if option.read is read_size else kind
    allowed = Annotated[typed, Field(ge=option.least, strict=kind in (int, bool) or None)]
    try:
        return TypeAdapter(allowed).validate_python([value] if kind == list[str] and isinstance(value, str) else value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise CaseFileError(first["msg"], file=str(path), key=f"{TABLE}.{key}", value=first["input"]) from error


def _from(folder: Path, name: str) -> str:
    """Return ``name`` with its path, if it has one, made relative to the current folder."""
    match = _PATH.fullmatch(name)
    if match is None or folder == Path() or Path(match["path"]).is_absolute():
        return name
    return f"{match['before'] or ''}{folder / match['path']}{match['after'] or ''}"
