"""What ``attncheck.reference`` offers, and that its stub names the same."""

import ast
import inspect
from importlib import import_module
from pathlib import Path

import pytest

from attncheck import reference
from attncheck.reference import spec, v0
from attncheck.reference.lazy_exports import homes
from attncheck.reference.utilities import builder, ubatch

HALVES = {"_compute_slot_mapping_numpy", "_compute_slot_mapping_python"}  # private in vLLM, which its callers use
PRIVATE = {"_KV_CACHE_LAYOUT_OVERRIDE", "_make_metadata_with_slice", *HALVES}


@pytest.mark.parametrize("package", [reference, v0])
def test_every_name_is_there_and_listed(package):
    home = homes(package.__file__)
    assert package.__all__ == sorted(set(home) - PRIVATE)
    for name in package.__all__:
        value = getattr(package, name)
        assert value is getattr(import_module(home[name]), name)
        assert value is vars(package)[name]
        assert name in dir(package)
        if package is reference and (inspect.isclass(value) or inspect.isroutine(value)):
            assert value.__doc__


def test_generations_differ_and_share_the_words():
    assert v0.compute_slot_mapping is not reference.compute_slot_mapping
    assert v0.AttentionMetadataBuilder is not reference.AttentionMetadataBuilder
    assert v0.AttentionType is spec.AttentionType
    assert v0.PAD_SLOT_ID == -1
    assert v0.TAttentionMetadata.__bound__ is v0.AttentionMetadata
    assert v0.IndexMap is v0.MultiModalPlaceholderMap.IndexMap


@pytest.mark.parametrize("package", [reference, v0])
def test_type_checkers_see_each_name_once_and_as_public(package):
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text())
    names = [alias for node in stub.body for alias in node.names]
    assert all(alias.asname == alias.name for alias in names)
    assert len({alias.name for alias in names}) == len(names)
    assert {alias.name for alias in names} == set(homes(package.__file__))


def test_private_names_are_read_from_their_module_each_time(monkeypatch):
    assert reference._make_metadata_with_slice is ubatch._make_metadata_with_slice
    assert reference._KV_CACHE_LAYOUT_OVERRIDE is None
    monkeypatch.setattr(builder, "_KV_CACHE_LAYOUT_OVERRIDE", "HND")
    assert reference._KV_CACHE_LAYOUT_OVERRIDE == "HND"
    assert not PRIVATE & {*vars(reference), *dir(reference)}


@pytest.mark.parametrize("package", [reference, v0])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = package.no_such_thing
