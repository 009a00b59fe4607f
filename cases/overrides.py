"""A suite with other defaults: ``decode{cache.block_size: 32, layer.head_size: 128}``.

For backends that do not support the page size, layout or head size of a suite. The keys in braces replace the suite's
``defaults``. A case keeps the keys it sets itself, so that no two cases become equal.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType

from attncheck.cases.tree import Scalar, Table, Tree, describe, plain, put
from attncheck.cases.yaml_tree import parse_yaml
from attncheck.errors import SelectionError
from attncheck.reference.spec import CacheSpec, LayerSpec

VARIED_KEYS: Mapping[str, type] = MappingProxyType({"layer": LayerSpec, "cache": CacheSpec})


def split_variant(ref: str) -> tuple[str, str]:
    """Return the suite's name or path, and the defaults in braces after it (braces included, empty without any)."""
    name, brace, rest = ref.partition("{")
    return (name, brace + rest) if brace and rest.endswith("}") else (ref, "")


def with_defaults(ref: str, settings: Sequence[str]) -> str:
    """Return ``ref`` with ``key=value`` settings appended to its own; a setting that it already has is not repeated.

    Raise SelectionError for a setting of another form.
    """
    if not settings:
        return ref
    name, braces = split_variant(ref)
    written = braces[1:-1].strip()
    given = [written] if written else []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise SelectionError(f"--set {setting!r}: give KEY=VALUE, such as cache.block_size=32")
        entry = f"{key.strip()}: {value.strip()}"
        if entry not in written.split(", "):
            given.append(entry)
    return f"{name}{{{', '.join(given)}}}"


def read_defaults(braces: str, ref: str) -> Table:
    """Return the mapping in braces, with its dotted keys resolved.

    Raise CaseFileError, with ``ref`` instead of a file, unless it holds keys of a layer or a cache with their values.
    """
    written: Tree = parse_yaml(braces, ref)
    if not isinstance(written, Table):
        raise written.place.fault(
            f"defaults are a mapping, and this is {describe(written)}", allowed="write {cache.block_size: 32}"
        )
    laid = Table(written.place, {}, {})
    for key, value in written.entries.items():
        path, place = tuple(key.split(".")), written.names[key]
        if path[0] not in VARIED_KEYS or len(path) < 2 or "" in path:
            meant = [f"{above}.{key}" for above, spec in VARIED_KEYS.items() if key in (f.name for f in fields(spec))]
            allowed = f"did you mean {meant[0]}?" if meant else "a dotted key below layer or cache"
            raise place.fault("braces cannot replace this key", value=key[:60], allowed=allowed)
        if isinstance(value, Scalar) and value.value is None and not value.text:
            raise place.fault("a default needs a value", value=key[:60], allowed=f"write {key[:60]}: VALUE")
        laid = put(laid, path, value, place, merging=True)
    return laid


def page_defaults(cache: Tree | None, over: Table | None) -> dict[str, str]:
    """Return ``cache.block_size`` and ``cache.layout`` of cases that leave them out, except keys that ``over`` gives.

    ``cache``: the cache of a file's defaults.
    """
    written, given = (
        table.entries if isinstance(table, Table) else {} for table in (cache, over and over.entries.get("cache"))
    )
    values = {
        name: plain(written[name]) if name in written else getattr(CacheSpec(), name)
        for name in ("block_size", "layout")
    }
    return {f"cache.{name}": str(value) for name, value in values.items() if name not in given}
