"""The JSON schema: up to date in the checkout, without `required`, and in agreement with the loader."""

import json
from dataclasses import fields

from attncheck.cases.loader import suite_file, suite_names
from attncheck.cases.schema import json_schema
from attncheck.reference.spec import BACKEND_CHECKS, PATHS, CacheSpec, LayerSpec

SCHEMA_FILE = suite_file("smoke").parent / "schema.json"


def keys_of(value):
    if isinstance(value, dict):
        return set(value).union(*(keys_of(item) for item in value.values()))
    return set().union(*(keys_of(item) for item in value)) if isinstance(value, list) else set()


def test_the_file_beside_the_suites_is_up_to_date():
    assert json.loads(SCHEMA_FILE.read_text()) == json_schema(), "write it again: attncheck list schema > schema.json"


def test_every_suite_names_the_schema():
    for name in suite_names():
        assert suite_file(name).read_text().startswith("# yaml-language-server: $schema=./schema.json\n"), name


def test_nothing_is_required_and_nothing_dangles():
    schema = json_schema()
    assert "required" not in keys_of(schema)
    text = json.dumps(schema)
    for name in schema["$defs"]:
        assert f'"#/$defs/{name}"' in text
    assert text.count('"$ref"') == sum(text.count(f'"#/$defs/{name}"') for name in schema["$defs"])


def test_it_has_every_key_and_name():
    schema = json_schema()
    case = schema["properties"]["cases"]["items"]["properties"]
    for kind in (LayerSpec, CacheSpec):
        assert list(schema["$defs"][kind.__name__]["properties"]) == [field.name for field in fields(kind)]
    assert case["checks"]["items"]["enum"] == list(BACKEND_CHECKS)
    named, with_options = schema["$defs"]["Path"]["anyOf"]
    assert set(named["enum"]) | set(with_options["properties"]) == set(PATHS)
    assert {"layer.sliding_window", "cache.block_size", "batch", "layer"} <= set(case["matrix"]["properties"])
