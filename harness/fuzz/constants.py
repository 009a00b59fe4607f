"""Finds the constants in a backend's code: sizes of tiles, splits, pages and heads. Imports none of that code.

They are read from the syntax tree of the backend's file and of the other files in its package.
"""

import ast
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

from attncheck.backends import registry

LEAST, MOST = 3, 4096
"""Range of constants: smaller ones occur in all code, and larger lengths take long."""

KEPT = 24
"""Number of constants that are kept, those of the highest weight."""


def constants_of(ref: str) -> tuple[int, ...]:
    """Return the integer constants in the backend's code, highest weight first; empty if there is no source."""
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
    """Return the Python file of a backend, or all files of its package if it has one of its own."""
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
    """Return the number of occurrences of each number in the code.

    Numbers in comparisons, arithmetic, assignments, defaults and calls count four times.
    """
    found: Counter[int] = Counter()
    for node in ast.walk(tree):
        is_relevant = isinstance(
            node, ast.Compare | ast.BinOp | ast.Assign | ast.AnnAssign | ast.keyword | ast.arguments | ast.Call
        )
        for child in ast.iter_child_nodes(node):
            number = child.value if isinstance(child, ast.Constant) else None
            if isinstance(number, int) and not isinstance(number, bool) and LEAST <= number <= MOST:
                found[number] += 4 if is_relevant else 1
    return found
