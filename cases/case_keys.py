"""Reads a case from the tree that its keys, the defaults and the values of a matrix form together."""

from typing import get_args

from attncheck.cases.batch_keys import read_batch, read_path
from attncheck.cases.company_keys import read_after, read_layers
from attncheck.cases.consistency import check_meaning
from attncheck.cases.model import Case, Tolerance
from attncheck.cases.paths import implied_path
from attncheck.cases.tree import Table, Tree
from attncheck.cases.validation import Mistakes, locate, names_of, validate
from attncheck.errors import CaseFileError, SpecError
from attncheck.reference.spec import (
    BACKEND_CHECKS,
    FORMER_CHECKS,
    CacheSpec,
    InputName,
    LayerSpec,
    PathSpec,
    StridesSpec,
)

INPUTS: tuple[InputName, ...] = get_args(InputName)


def read_case(tree: Table, suite: str, name: str, description: str, origin: str) -> Case:
    """Return the case of a fully merged tree; raise :class:`CaseFileError` with all its mistakes."""
    for key, what in (("layer", "the layer's head counts and head size"), ("batch", "the requests")):
        if key not in tree.entries:
            raise tree.place.fault(f"{key} is missing", allowed=f"give {what} here or in defaults")
    mistakes, entries = Mistakes(), tree.entries
    cache, path, checks, tolerance, inputs, strides = CacheSpec(), PathSpec(), None, None, None, None
    with mistakes.kept():
        layer = validate(LayerSpec, entries["layer"], "a layer")
        path = implied_path(layer)
    if "cache" in entries:
        with mistakes.kept():
            cache = validate(CacheSpec, entries["cache"], "a cache")
    if "path" in entries:
        with mistakes.kept():
            path = read_path(entries["path"])
    with mistakes.kept():
        batch = read_batch(entries["batch"], path)
    if "checks" in entries:
        with mistakes.kept():
            checks = _read_checks(entries["checks"])
    if "tolerance" in entries:
        with mistakes.kept():
            tolerance = validate(Tolerance, entries["tolerance"], "a tolerance")
    if "inputs" in entries:
        with mistakes.kept():
            named = names_of(entries["inputs"], "input", INPUTS)
            inputs = tuple(each for each in INPUTS if each in named)
    if "strides" in entries:
        with mistakes.kept():
            strides = validate(StridesSpec, entries["strides"], "strides")
    mistakes.raise_all()
    try:
        check_meaning(layer, cache, batch)
    except SpecError as error:
        raise _point(tree, error) from error
    after = read_after(entries["after"], layer, cache, path) if "after" in entries else ()
    layers = read_layers(entries["layers"], entries["layer"], layer, cache, batch) if "layers" in entries else ()
    return Case(
        suite=suite,
        id=name,
        layer=layer,
        cache=cache,
        batch=batch,
        checks=checks,
        tolerance=tolerance,
        inputs=inputs,
        after=after,
        layers=layers,
        strides=strides,
        description=description,
        origin=origin,
    )


def _read_checks(tree: Tree) -> tuple[str, ...]:
    names = [FORMER_CHECKS.get(name, name) for name in names_of(tree, "check", BACKEND_CHECKS, FORMER_CHECKS)]
    if not names:
        raise tree.place.fault("no check is left", allowed="leave checks out for all that apply")
    return tuple(check for check in BACKEND_CHECKS if check in names)


def _point(tree: Table, error: SpecError) -> CaseFileError:
    """Return a :class:`SpecError` of a whole case as an error at the value it names, or at its nearest parent."""
    parts = [int(part) if part.isdigit() else part for part in error.field.split(".")]
    place = locate(tree, parts)
    return place.fault(error.reason, value=error.value, allowed=error.allowed)
