"""The keys ``after`` and ``layers`` of a case: batches before its own, and the other layers of its step."""

from dataclasses import fields, replace

from attncheck.cases.batch_keys import read_batch
from attncheck.cases.consistency import check_meaning
from attncheck.cases.paths import implied_path
from attncheck.cases.tree import Items, Table, Tree, describe, merge
from attncheck.cases.validation import validate
from attncheck.errors import SpecError
from attncheck.reference.spec import BatchSpec, CacheSpec, LayerSpec, PathSpec

DIFFERENT_KEYS = ("scale", "sliding_window", "logits_soft_cap", "alibi", "sinks", "kv_sharing", "head_size")
"""Keys in which the layers of one step may differ. A layer of another head size has its own builder and pages."""

_MOST = 16
"""Most batches and most layers that a case may name; each takes as much work as the case itself."""


def read_after(tree: Tree, layer: LayerSpec, cache: CacheSpec, path: PathSpec) -> tuple[BatchSpec, ...]:
    """Return the batches before a case's own, each on the case's path if valid, else on the path the layer implies."""
    batches = []
    for item in _list(tree, "after", "batches"):
        batch = read_batch(item, path)
        # Each batch has its own pool, as large as needed.
        room = replace(cache, num_blocks=None)
        try:
            check_meaning(layer, room, batch)
        except SpecError as own:
            if path.name == "fast_prefill":  # its builder accepts no batch of another path
                raise item.place.fault(own.reason, value=own.value, allowed=own.allowed) from own
            batch = replace(batch, path=implied_path(layer))
            try:
                check_meaning(layer, room, batch)
            except SpecError as error:
                raise item.place.fault(error.reason, value=error.value, allowed=error.allowed) from error
        batches.append(batch)
    return tuple(batches)


def read_layers(tree: Tree, own: Tree, layer: LayerSpec, cache: CacheSpec, batch: BatchSpec) -> tuple[LayerSpec, ...]:
    """Return the layers of a step from mappings of the keys in which they differ from the case's own layer."""
    layers = []
    for item in _list(tree, "layers", "mappings"):
        if not isinstance(item, Table):
            raise item.place.fault(
                f"a layer must be a mapping, and this is {describe(item)}", allowed="write {} for a twin"
            )
        made = validate(LayerSpec, merge(own, item), "a layer")
        for field in fields(LayerSpec):
            if field.name not in DIFFERENT_KEYS and getattr(made, field.name) != getattr(layer, field.name):
                allowed = f"layers of one step may differ in {', '.join(DIFFERENT_KEYS)}"
                place = item.names.get(field.name, item.place)
                raise place.fault("a step has no layers that differ in this", value=field.name, allowed=allowed)
        try:
            check_meaning(made, cache, batch)
        except SpecError as error:
            raise item.place.fault(error.reason, value=error.value, allowed=error.allowed) from error
        layers.append(made)
    return tuple(layers)


def differences(layer: LayerSpec, own: LayerSpec) -> dict[str, object]:
    """Return the keys of ``layer`` that differ from a case's own layer, as ``layers`` lists them."""
    given = {name: getattr(layer, name) for name in DIFFERENT_KEYS}
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in given.items()
        if value != getattr(own, name)
    }


def _list(tree: Tree, key: str, content: str) -> tuple[Tree, ...]:
    if not isinstance(tree, Items):
        raise tree.place.fault(
            f"{key} must be a list of {content}, and this is {describe(tree)}", allowed="write [...]"
        )
    if len(tree.items) > _MOST:
        raise tree.place.fault(f"{key} is too long", value=len(tree.items), allowed=f"at most {_MOST}")
    return tuple(tree.items)
