"""JSON of foreign texts for a page; escaping for HTML is left to the templates."""

import json
import re
from typing import Any

from attncheck.reports.analysis.phrases import printable

_UNUSUAL_JSON = re.compile(r"[^\x20-\x7e]|\\u00")


def clean_json(value: object) -> str:
    """Return ``value`` as compact JSON, with every text in it cleaned, keys included.

    Raises:
        ValueError: a float is not finite.
    """
    text = _dump(value)
    # Most values contain nothing unusual, so their members need no visit.
    return _dump(_cleaned(value)) if _UNUSUAL_JSON.search(text) else text


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case dict():
            return {printable(name): _cleaned(member) for name, member in value.items()}
        case list() | tuple():
            return [_cleaned(member) for member in value]
        case _:
            return value
