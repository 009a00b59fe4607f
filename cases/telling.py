"""The cases and checks of ``smoke`` that catch the most mutants a second: what a run with little time examines first.

``telling.json`` lists them in order. ``benchmarks/telling.py`` makes it.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

FILE = Path(__file__).with_name("telling.json")


@cache
def ranks() -> Mapping[tuple[str, str], int]:
    """Return the place in the order of each pair of a case key (``suite/id``) and a check that it has."""
    listed = json.loads(FILE.read_text(encoding="utf-8"))
    pairs = (pair.split() for pair in listed["order"])
    return MappingProxyType({(f"{listed['suite']}/{case}", check): place for place, (case, check) in enumerate(pairs)})
