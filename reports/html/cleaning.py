"""Text of foreign code made fit for a page: what a browser would obey rather than show is replaced.

Escaping for HTML is left to what writes it. Must not know: where the text stands.
"""

import re
from typing import Any

from attncheck.reports import phrases

_UNUSUAL = re.compile(r"[^\n\t\x20-\x7e]")


def clean(text: str) -> str:
    """``text`` without control and formatting characters, such as those that turn the direction of writing."""
    return phrases.printable(text) if _UNUSUAL.search(text) else text


def clean_all(value: Any) -> Any:
    """The same value with every text in it cleaned, names included."""
    match value:
        case str():
            return clean(value)
        case dict():
            return {clean(name): clean_all(member) for name, member in value.items()}
        case list() | tuple():
            return [clean_all(member) for member in value]
        case _:
            return value
