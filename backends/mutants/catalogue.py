"""Reads the catalogue of mutants and their faults, without loading torch or a mutant."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from attncheck.errors import CaseFileError, UnknownNameError
from attncheck.reference.spec import CHECKS

PREFIX = "mutants:"
"""Prefix of a reference to a mutant."""

PROVIDER = "utilities"
"""The base of mutants that are a provider of metadata utilities instead of a backend."""

PLAIN = "plain"
"""The base of most mutants, which is no candidate."""

PLAIN_FILE = "backends/mutants/plain.py"

PLAIN_REF = "attncheck.backends.mutants.plain:PlainBackend"

_REFS = {PLAIN: PLAIN_REF, PROVIDER: "attncheck.reference"}
"""References of the bases that are no registered backends."""

_FOLDER = Path(__file__).parent
_NAME = r"[a-z0-9]+(-[a-z0-9]+)*"

_Text = Annotated[str, Field(min_length=1)]


def _as_tuple(given: object) -> object:
    return (given,) if isinstance(given, str) else given


class Mutant(BaseModel):
    """A correct backend with one fault added.

    The fault is either ``class_name``, a class of the Python file of ``area``, or a patch: each text of ``old``,
    replaced by the one of ``new`` in the source ``file`` of ``base``.

    base: the backend that it is without the fault, by its registered name or :data:`PLAIN`; or :data:`PROVIDER`.
    kind: the class of faults.
    check: the check that catches it, for example at ``case``.
    cause: a regular expression that a correct diagnosis matches.
    report: the address of a public report of such a fault.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[str, Field(pattern=f"^{_NAME}$")]
    area: Annotated[str, Field(pattern=r"^\w+$")]
    kind: Annotated[str, Field(pattern=f"^{_NAME}$")]
    fault: _Text
    report: Annotated[str, Field(pattern="^https://")] | None = None
    check: str | None = None
    case: _Text | None = None
    cause: _Text | None = None
    class_name: Annotated[_Text | None, Field(alias="class")] = None
    base: _Text = PLAIN
    file: Annotated[str, Field(pattern=r"^(backends|reference)/[\w/]+\.py$")] = PLAIN_FILE
    old: Annotated[tuple[_Text, ...], BeforeValidator(_as_tuple)] = ()
    new: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()

    @field_validator("check")
    @classmethod
    def _is_check(cls, check: str | None) -> str | None:
        if check is not None and check not in CHECKS:
            raise ValueError(f"no check has this name; known are {', '.join(CHECKS)}")
        return check

    @field_validator("cause")
    @classmethod
    def _is_expression(cls, cause: str | None) -> str | None:
        try:
            re.compile(cause or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from error
        return cause

    @model_validator(mode="after")
    def _has_one_fault(self) -> Self:
        if len(self.old) != len(self.new) or bool(self.old) == bool(self.class_name):
            raise ValueError("a mutant has either class alone, or old and new, with equally many texts")
        return self

    @property
    def ref(self) -> str:
        """The reference that loads it."""
        return f"{PREFIX}{self.name}"

    @property
    def base_ref(self) -> str:
        """The reference that loads its base."""
        return _REFS.get(self.base, self.base)

    @property
    def is_provider(self) -> bool:
        """Whether it is a provider of utilities instead of a backend."""
        return self.base == PROVIDER


@cache
def catalogue() -> tuple[Mutant, ...]:
    """Return every mutant, by area, in the order of its file.

    Raises:
        CaseFileError: an entry is invalid, or its name is taken.
    """
    found: dict[str, Mutant] = {}
    for path in sorted(_FOLDER.glob("*.yaml")):
        for mutant in read_mutants(path):
            if mutant.name in found:
                raise CaseFileError(
                    f"{mutant.name} is the name of a mutant of {found[mutant.name].area}.yaml",
                    file=str(path),
                    key=mutant.name,
                )
            found[mutant.name] = mutant
    return tuple(found.values())


def mutant_of(name: str) -> Mutant:
    """Return the mutant of this name.

    Raises:
        UnknownNameError: there is none.
    """
    for mutant in catalogue():
        if mutant.name == name:
            return mutant
    raise UnknownNameError("mutant", name, [mutant.name for mutant in catalogue()])


def read_mutants(path: Path) -> Iterator[Mutant]:
    """Yield the mutants of a YAML file; the fault of a class is its docstring, unless the entry gives one.

    Raises:
        CaseFileError: the file is no list of mappings, or an entry is invalid.
    """
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise CaseFileError("the file must hold a list of mutants", file=str(path), value=type(entries).__name__)
    faults = _docstrings(path.with_suffix(".py"))
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict):
            raise CaseFileError("is no mapping", file=str(path), key=f"entry {number}", value=entry)
        given = {"fault": faults.get(str(entry.get("class")), "")} | entry | {"area": path.stem}
        try:
            yield Mutant.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, (entry.get("name", f"entry {number}"), *first["loc"])))
            value = first["input"] if first["loc"] else None
            raise CaseFileError(first["msg"], file=str(path), key=key, value=value) from error


def _docstrings(path: Path) -> dict[str, str]:
    """Return the docstrings of the classes of a Python file, each in one line; an empty dict if there is no file."""
    if not path.is_file():
        return {}
    classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {node.name: " ".join((ast.get_docstring(node) or "").split()) for node in classes}
