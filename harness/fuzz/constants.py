"""The numbers that a backend's code branches on: sizes of tiles, splits, pages and heads. Imports nothing of it.

Found in the syntax tree of the file that has the backend, and of the files beside it in its package.
"""

import ast
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from attncheck.backends import registry

LEAST, MOST = 3, 4096
"""Smaller numbers are in every code, and larger lengths take long."""

KEPT = 24
"""The numbers that are kept: those in comparisons and divisions, in names and defaults, then the most frequent."""


def constants_of(ref: str) -> tuple[int, ...]:
    """The whole numbers of the code that the backend's reference names, the most telling first; empty: no source."""
    weights: Counter[int] = Counter()
    for file in sources_of(ref):
        try:
            tree = ast.parse(file.read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        weights.update(_weights(tree))
    ranked = sorted(weights, key=lambda number: (-weights[number], number))
    return tuple(ranked[:KEPT])


def sources_of(ref: str) -> tuple[Path, ...]:
    """The Python files of a backend: its own, and where that lies in a folder of its own, those beside and below it."""
    place, _, _ = registry.BUILTIN.get(ref, ref).rpartition(":")
    file = Path(place or ref)
    if file.suffix == ".py":
        return (file,) if file.is_file() else ()
    try:
        spec = find_spec(place or ref)
    except (ImportError, ValueError):
        return ()
    if spec is None or spec.origin is None:
        return ()
    own = Path(spec.origin)
    in_package = own.parent.name not in ("candidates", "site-packages") and (own.parent / "__init__.py").is_file()
    return tuple(sorted(own.parent.rglob("*.py"))) if in_package else (own,)


def _weights(tree: ast.AST) -> Counter[int]:
    """How often each number stands in the code; four times where it is compared, divides, or has a name."""
    found: Counter[int] = Counter()
    for node in ast.walk(tree):
        telling = isinstance(
            node, ast.Compare | ast.BinOp | ast.Assign | ast.AnnAssign | ast.keyword | ast.arguments | ast.Call
        )
        for child in ast.iter_child_nodes(node):
            number = child.value if isinstance(child, ast.Constant) else None
            if isinstance(number, int) and not isinstance(number, bool) and LEAST <= number <= MOST:
                found[number] += 4 if telling else 1
    return found
