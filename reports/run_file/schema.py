"""The JSON schema of a line of a run file, generated from the models."""

from typing import Any

from pydantic import TypeAdapter

from attncheck.reports.run_file.header import FORMAT
from attncheck.reports.run_file.records import Line

_NOT_FINITE = {"enum": ["NaN", "Infinity", "-Infinity"]}
"""The JSON values of non-finite figures."""


def run_file_schema() -> dict[str, Any]:
    """Return the schema (draft 2020-12) of a line of a run file of this version."""
    generated = _without_titles(TypeAdapter[Any](Line).json_schema())
    for definition in generated["$defs"].values():
        if figures := definition["properties"].get("figures"):
            figures["additionalProperties"]["anyOf"].append(_NOT_FINITE)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a line of a run file of attncheck",
        "$comment": f"format {FORMAT}; docs/run-files.md explains it",
        **generated,
    }


def _without_titles(schema: Any) -> Any:
    """Return the schema without the titles that pydantic derives from field names."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)
        }
    return [_without_titles(value) for value in schema] if isinstance(schema, list) else schema
