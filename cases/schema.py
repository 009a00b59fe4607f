"""The JSON schema of a case file, for editors.

It is generated from the specs that validate, so that the two cannot differ. Nothing is ``required``: a ``layer`` may be
partial, because defaults and a matrix complete it before validation.
"""

from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter

from attncheck.cases.keys import DIFFERENT_KEYS, INPUTS
from attncheck.cases.model import Tolerance
from attncheck.cases.suite_file import SETTABLE_KEYS
from attncheck.reference.spec import BACKEND_CHECKS, LayerSpec
from attncheck.reference.step_spec import PATH_OPTIONS, BlockTableSpec, CacheSpec, PaddingSpec, RequestSpec, StridesSpec

_Schema = dict[str, Any]

_NAME: _Schema = {"type": "string", "pattern": "^[A-Za-z0-9_.-]+$"}
_BATCH_STRING: _Schema = {
    "type": "string",
    "pattern": "^[0-9]*q[0-9]+k?(s[0-9]+k?)?(_[0-9]*q[0-9]+k?(s[0-9]+k?)?)*$",
    "description": "segments [count]q<new tokens>[s<total tokens>] joined by _, with k for x1024: 2q2ks4k_32q1s1k",
}


def json_schema() -> _Schema:
    """Return the schema (draft 2020-12) of a case file as a plain dictionary."""
    kinds = {
        "LayerSpec": LayerSpec,
        "CacheSpec": CacheSpec,
        "RequestSpec": RequestSpec,
        "PaddingSpec": PaddingSpec,
        "StridesSpec": StridesSpec,
        "BlockTableSpec": BlockTableSpec,
        "Tolerance": Tolerance,
    }
    options = {kind.__name__: kind for kind in PATH_OPTIONS.values() if kind is not None}
    _, generated = TypeAdapter.json_schemas(
        [(name, "validation", TypeAdapter(kind)) for name, kind in (kinds | options).items()]
    )
    definitions: _Schema = _tidy(generated["$defs"])
    definitions["Batch"] = _batch()
    definitions["Path"] = _path()
    settable: _Schema = {
        "layer": _ref("LayerSpec"),
        "cache": _ref("CacheSpec"),
        "batch": _ref("Batch"),
        "path": _ref("Path"),
        "after": {
            "type": "array",
            "items": _ref("Batch"),
            "description": "batches before this one, on the same impl and builder",
        },
        "layers": {
            "type": "array",
            "items": _mapping({name: definitions["LayerSpec"]["properties"][name] for name in DIFFERENT_KEYS}),
            "description": "the other layers of the step: the keys that differ from the case's layer",
        },
        "checks": _names(BACKEND_CHECKS, "the checks to run; default: all that apply"),
        "tolerance": _ref("Tolerance"),
        "inputs": _names(INPUTS, "special inputs to plant; default: those that suit the case"),
        "strides": _ref("StridesSpec"),
    }
    case = {
        "id": _NAME | {"description": "name of the case, unique in its suite"},
        "description": {"type": "string"},
        "weight": {
            "type": "number",
            "exclusiveMinimum": 0,
            "description": "how often the case occurred in recorded traffic; its times are weighted by it",
        },
        **settable,
        "matrix": _matrix(definitions, settable),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "attncheck suite",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "suite": _NAME | {"description": "name of the suite"},
            "description": {"type": "string"},
            "defaults": _mapping(settable) | {"description": "values that every case starts from"},
            "cases": {"type": "array", "minItems": 1, "items": _mapping(case)},
        },
        "$defs": definitions,
    }


def _ref(name: str) -> _Schema:
    return {"$ref": f"#/$defs/{name}"}


def _mapping(properties: _Schema) -> _Schema:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _names(known: Iterable[str], description: str) -> _Schema:
    items = {"type": "string", "enum": list(known)}
    return {"type": "array", "items": items, "uniqueItems": True, "description": description}


def _batch() -> _Schema:
    requests = {"type": "array", "minItems": 1, "items": _ref("RequestSpec")}
    fields = {"padding": _ref("PaddingSpec"), "block_table": _ref("BlockTableSpec")}
    whole = _mapping({"requests": {"anyOf": [_BATCH_STRING, requests]}} | fields)
    return {"anyOf": [_BATCH_STRING, requests, whole], "description": "the requests of one step"}


def _path() -> _Schema:
    """Return the schema of a path: a name, or a mapping from one name to its options."""
    named = {"type": "string", "enum": [name for name in PATH_OPTIONS if name != "micro_batch"]}
    with_options = {name: _ref(kind.__name__) for name, kind in PATH_OPTIONS.items() if kind is not None}
    described = "the attention path; default: the one that the layer implies"
    return {"anyOf": [named, _mapping(with_options) | {"maxProperties": 1}], "description": described}


def _matrix(definitions: _Schema, settable: _Schema) -> _Schema:
    """Return the schema of a matrix: known axes with their values, for completion, and deeper ones by pattern."""

    def axis(schema: _Schema) -> _Schema:
        return {"type": "array", "minItems": 1, "items": schema}

    axes = {key: axis(schema) for key, schema in settable.items()}
    for key, kind in (("layer", "LayerSpec"), ("cache", "CacheSpec")):
        axes |= {f"{key}.{name}": axis(schema) for name, schema in definitions[kind]["properties"].items()}
    return {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": axes,
        "patternProperties": {f"^({'|'.join(SETTABLE_KEYS)})\\.[^.]+\\.[^.]+": axis({}), "^batch\\.[^.]+$": axis({})},
        "description": "axes by dotted key; the case runs once for every combination of their values",
    }


def _tidy(schema: Any) -> Any:
    """Return the schema without titles, ``required`` and null defaults, which only add noise in an editor."""
    if isinstance(schema, list):
        return [_tidy(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {}
    for key, value in schema.items():
        is_noise = (key == "title" and isinstance(value, str)) or (key == "required" and isinstance(value, list))
        if not is_noise and not (key == "default" and value is None):
            tidy[key] = _tidy(value)
    return tidy
