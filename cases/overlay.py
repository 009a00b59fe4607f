"""Laying one tree over another: defaults under a case, a matrix value into its place.

Works on positioned trees, so that every value keeps the line it was written on. Knows nothing of what keys mean.
"""

from collections.abc import Sequence

from attncheck.cases.tree import Place, Table, Tree, describe


def merge(base: Tree, over: Tree) -> Tree:
    """``over`` laid over ``base``: mappings are merged key by key at every level, anything else is replaced."""
    if not isinstance(base, Table) or not isinstance(over, Table):
        return over
    entries = dict(base.entries)
    for name, value in over.entries.items():
        entries[name] = merge(entries[name], value) if name in entries else value
    return Table(over.place, entries, {**base.names, **over.names})


def put(tree: Table, path: Sequence[str], value: Tree, place: Place, *, merging: bool) -> Table:
    """``tree`` with ``value`` at ``path``; missing mappings on the way are made.

    ``merging`` lays a mapping over one that stands there, instead of replacing it. ``place`` is where the path was
    written. Raises :class:`~attncheck.errors.CaseFileError` if the way leads through something that is no mapping.
    """
    name, *rest = path
    below = tree.entries.get(name)
    if rest:
        inner = Table(place, {}, {}) if below is None else below
        if not isinstance(inner, Table):
            raise place.fault(
                f"{name} is {describe(inner)} on line {inner.place.line}, so there is no {'.'.join(rest)} in it",
                allowed=f"write {name} as a mapping there",
            )
        value = put(inner, rest, value, place, merging=merging)
    elif below is not None and merging:
        value = merge(below, value)
    return Table(tree.place, {**tree.entries, name: value}, {**tree.names, name: place})
