"""Names and messages of a backend are text on the page, and nothing but text."""

import re
import unicodedata
from typing import Any

import pytest

from attncheck.reports.html import render_runs


@pytest.fixture(scope="module")
def text(hostile: Any) -> str:
    return render_runs([hostile, hostile])


def test_no_element_and_no_attribute_comes_from_a_text(parse: Any, hostile: Any) -> None:
    parsed = parse(hostile)
    assert parsed.faults == []
    assert [each.get("type") for each in parsed.all("script")] == ["application/json", None]
    for tag in ("img", "b", "textarea"):
        assert [each for each in parsed.all(tag) if "src" in each or not each.keys() <= {"class", "style"}] == []
    names = {name for _, attributes in parsed.elements for name in attributes}
    assert not {name for name in names if name.startswith("on") or "hacked" in name}
    assert len(parsed.all("style")) == len(parsed.all("title")) == 1


def test_nothing_is_left_that_a_browser_obeys(text: str) -> None:
    unusual = {character for character in text if unicodedata.category(character) in ("Cc", "Cf")}
    assert unusual <= {"\n", "\t"}
    assert text.count("</script") == 2
    assert "<!--" not in text


def test_texts_are_shown_verbatim(parse: Any, hostile: Any, hostile_texts: tuple[str, ...]) -> None:
    parsed = parse(hostile)
    for text in hostile_texts:
        cleaned = "".join(c if unicodedata.category(c) not in ("Cc", "Cf") else "?" for c in text)
        assert cleaned in parsed.data["backends"]
        assert re.sub(r"\s+", " ", cleaned) in parsed.shown
    assert any(r"$\frac{1}{0}$" in chart_text for chart_text in parsed.texts["text"])  # within a chart


def test_a_long_message_is_shown_once_and_whole_where_it_is_opened(parse: Any, hostile: Any) -> None:
    parsed = parse(hostile)
    (body,) = [each for each in parsed.data["bodies"] if len(each.get("what", "")) > 100_000]
    assert body["what"].endswith("long ")
    assert len(parsed.shown) < 400_000
