"""What ``attncheck.reference`` offers, and that asking for a word loads no torch."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from attncheck import reference
from attncheck.reference.utilities import kv_cache_layout, ubatch


def test_every_name_is_there_and_listed():
    assert len(set(reference.__all__)) == len(reference.__all__)
    for name in reference.__all__:
        value = getattr(reference, name)
        assert value is getattr(import_module(f"attncheck.reference.{reference._HOME[name]}"), name)
        assert name in dir(reference)
        if inspect.isclass(value) or inspect.isroutine(value):
            assert value.__doc__
    assert set(reference._HOME) == set(reference.__all__)


def test_what_type_checkers_see_is_what_is_offered():
    tree = ast.parse(Path(reference.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == {name: f"attncheck.reference.{home}" for name, home in reference._HOME.items()}


def test_private_names_are_asked_of_their_module_each_time(monkeypatch):
    assert reference._make_metadata_with_slice is ubatch._make_metadata_with_slice
    assert reference._KV_CACHE_LAYOUT_OVERRIDE is None
    monkeypatch.setattr(kv_cache_layout, "_KV_CACHE_LAYOUT_OVERRIDE", "HND")
    assert reference._KV_CACHE_LAYOUT_OVERRIDE == "HND"
    assert not set(reference._UNLISTED) & set(vars(reference))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = reference.no_such_thing
