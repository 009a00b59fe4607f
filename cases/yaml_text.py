"""Writes cases as the text of a case file, with every field that is not at its default."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from attncheck.cases.grammar import format_batch
from attncheck.cases.keys import differences
from attncheck.cases.model import Case, question
from attncheck.errors import SpecError

_WIDTH = 100
_SHARED = ("layer", "cache")
"""Keys whose common values become the defaults."""


def case_yaml(case: Case) -> str:
    """Return a case file with the same question as ``case``."""
    return _text({"suite": case.suite, "cases": [_entry(case)]})


def suite_yaml(name: str, description: str, cases: Sequence[Case]) -> str:
    """Return a case file of several cases; the keys that all their layers and caches share become its ``defaults``."""
    entries = [_entry(case) for case in cases]
    for entry, case in zip(entries, cases, strict=True):
        entry["batch"] = _short_batch(case, entry["batch"])
    defaults = {key: _common(entry.get(key, {}) for entry in entries) for key in _SHARED}
    for entry in entries:
        for key, common in defaults.items():
            entry[key] = {name: value for name, value in entry.get(key, {}).items() if name not in common}
    document = {
        "suite": name,
        "description": description,
        "defaults": {key: common for key, common in defaults.items() if common},
        "cases": [{key: value for key, value in entry.items() if key not in _SHARED or value} for entry in entries],
    }
    return _text(document)


def _text(document: Mapping[str, Any]) -> str:
    text: str = yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=_WIDTH, allow_unicode=True)
    return text


def _entry(case: Case) -> dict[str, Any]:
    fields = question(case)
    path: Any = fields.get("path", {}).get("name")
    if path is not None and "options" in fields["path"]:
        path = {path: fields["path"]["options"]}
    tolerance = case.tolerance and {"factor": case.tolerance.factor, "reason": case.tolerance.reason}
    entry = {
        "id": case.id,
        "description": case.description,
        "weight": case.weight,
        "layer": fields["layer"],
        "cache": fields.get("cache"),
        "path": path,
        "batch": _batch_keys(fields),
        "after": [_batch_keys(batch) for batch in fields.get("after", ())],
        "layers": [differences(layer, case.layer) for layer in case.layers],
        "strides": fields.get("strides"),
        "checks": list(case.checks or ()),
        "tolerance": tolerance,
    }
    if case.inputs is not None:
        entry["inputs"] = list(case.inputs)
    return {key: value for key, value in entry.items() if value not in (None, "", []) or key == "inputs"}


def _batch_keys(fields: Mapping[str, Any]) -> Any:
    around = {key: fields[key] for key in ("padding", "block_table") if key in fields}
    return {"requests": fields["requests"], **around} if around else fields["requests"]


def _short_batch(case: Case, batch: Any) -> Any:
    """Return ``batch`` with its requests as one string, if a string can express them."""
    try:
        text = format_batch(case.batch.requests)
    except SpecError:
        return batch
    return {**batch, "requests": text} if isinstance(batch, dict) else text


def _common(tables: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the entries that are the same in all tables."""
    first, *others = tables
    return {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
