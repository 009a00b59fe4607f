"""The layout of the KV cache: override, environment, default, settled once."""

import pytest

from attncheck import reference
from attncheck.errors import ReferenceArgumentError
from attncheck.reference import get_kv_cache_layout, is_valid_kv_cache_layout, set_kv_cache_layout
from attncheck.reference.utilities import builder


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """As in a process that has not read the layout yet."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(builder, "_KV_CACHE_LAYOUT_OVERRIDE", None)
    get_kv_cache_layout.cache_clear()
    yield
    get_kv_cache_layout.cache_clear()


@pytest.mark.parametrize(
    ("value", "valid"), [("NHD", True), ("HND", True), ("nhd", False), ("", False), ("LBNHC", False), (" NHD", False)]
)
def test_two_layouts_are_valid_to_the_letter(value, valid):
    assert is_valid_kv_cache_layout(value) is valid


def test_the_default():
    assert get_kv_cache_layout() == "NHD"


def test_the_first_answer_stays_until_the_cache_is_cleared(monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert get_kv_cache_layout() == "HND"
    assert set_kv_cache_layout("NHD") is None
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "nonsense")
    assert get_kv_cache_layout() == "HND"
    get_kv_cache_layout.cache_clear()
    assert get_kv_cache_layout() == "NHD"


def test_the_override_hides_the_environment_and_can_be_removed(monkeypatch):
    set_kv_cache_layout("HND")
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "nhd")
    assert get_kv_cache_layout() == "HND"
    set_kv_cache_layout(None)
    get_kv_cache_layout.cache_clear()
    with pytest.raises(ReferenceArgumentError, match="VLLM_KV_CACHE_LAYOUT = 'nhd'"):
        get_kv_cache_layout()


@pytest.mark.parametrize("value", ["nhd", "", "LBNHC"])
def test_a_refused_environment_is_not_remembered(value, monkeypatch):
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", value)
    with pytest.raises(ReferenceArgumentError, match="VLLM_KV_CACHE_LAYOUT") as refusal:
        get_kv_cache_layout()
    assert refusal.value.value == value
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert get_kv_cache_layout() == "HND"


@pytest.mark.parametrize("value", ["nhd", "", 3])
def test_an_unknown_override_is_refused_and_not_stored(value):
    set_kv_cache_layout("HND")
    with pytest.raises(ReferenceArgumentError, match="cache_layout"):
        set_kv_cache_layout(value)
    assert reference._KV_CACHE_LAYOUT_OVERRIDE == "HND"


def test_the_room_shows_the_override_as_it_is_now():
    seen = []
    for layout in ("HND", "NHD", None):
        set_kv_cache_layout(layout)
        seen.append(reference._KV_CACHE_LAYOUT_OVERRIDE)
    assert seen == ["HND", "NHD", None]
