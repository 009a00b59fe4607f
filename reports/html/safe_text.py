"""Text of foreign code made fit for a page: what a browser would obey rather than show is replaced.

Escaping for HTML is left to what writes it.
"""

import json
import re
from typing import Any

from attncheck.reports.analysis import phrases

_UNUSUAL_JSON = re.compile(r"[^\x20-\x7e]|\\u00")


def clean(text: str) -> str:
    """``text`` without control and formatting characters, such as those that turn the direction of writing."""
    return phrases.printable(text)


def clean_json(value: object) -> str:
    """``value`` as compact JSON, with every text in it cleaned, names included; a figure must be finite.

    Raises:
        ValueError: a figure is not.
    """
    text = _dump(value)
    # Most values say nothing unusual, and need not be walked through.
    return _dump(_cleaned(value)) if _UNUSUAL_JSON.search(text) else text


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _cleaned(value: Any) -> Any:
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(name): _cleaned(member) for name, member in value.items()}
        case list() | tuple():
            return [_cleaned(member) for member in value]
        case _:
            return value
