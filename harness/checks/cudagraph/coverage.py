"""Assign probes to the layers and caches of a run, so that together they cover what a graph fault may depend on.

A graph fault depends on a probe and often on one trait of a layer or cache, such as a window, a dtype or a page size.
So every pair of a trait and a probe is played on some layer, but not every probe on every layer. Of probes that differ
in one number only, each trait meets one. The first probes of each level also meet every pair of traits, such as a
window with pages of 32 tokens. Faults that need more traits are missed if no layer with all of them plays the right
probe.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations, cycle

from attncheck.reference.spec import CacheSpec, LayerSpec

Trait = tuple[str, object]
"""Name and value, such as ``("dtype", "float16")``."""


def traits_of(layer: LayerSpec, cache: CacheSpec) -> frozenset[Trait]:
    """Return the traits that select which code of a backend runs.

    Numbers that only change values, such as a window size or a scale, are no traits. Head sizes and group sizes are no
    traits either, because every layer plays at least one probe, and so does every size.
    """
    traits: set[Trait] = {
        ("dtype", layer.dtype),
        ("block_size", cache.block_size),
        ("layout", cache.layout),
        ("kv_cache_dtype", cache.kv_cache_dtype),
    }
    traits |= {(name, True) for name in layer.modifiers if name != "sliding_window"}
    if layer.sliding_window is not None:
        traits.add(("sliding_window", "left" if layer.is_causal else "both sides"))
    is_on = {
        "non_causal": not layer.is_causal,
        "head_size_v": layer.value_head_size != layer.head_size,
        "kv_sharing": layer.kv_sharing,
        "sinks_dtype": layer.sinks_dtype is not None,
        "mla": layer.mla is not None,
        "output_quant": layer.output_quant is not None,
        "scales per head": any(isinstance(scale, tuple) for scale in (cache.k_scale, cache.v_scale, cache.q_scale)),
    }
    return frozenset(traits | {(name, True) for name, holds in is_on.items() if holds})


def plainest(traits: Sequence[frozenset[Trait]]) -> int:
    """Return the index of the layer with the fewest traits. Break ties by the most common traits, then by order.

    Other layers are expected to show the faults of this one, so it should have most in common with them.
    """
    layers = Counter(trait for own in traits for trait in own)
    return min(range(len(traits)), key=lambda index: (len(traits[index]), -sum(layers[each] for each in traits[index])))


def assign_probes(
    traits: Sequence[frozenset[Trait]],
    probes: Sequence[str],
    paired: Collection[str] = (),
    alike: Collection[Collection[str]] = (),
) -> tuple[frozenset[str], ...]:
    """Return the probes that each layer plays: all of them for the plainest layer, at least one for each other.

    Each trait of a layer meets each probe, except that of each set in ``alike`` it meets one; a set's probes take
    turns. Each pair of traits of a layer meets the probes in ``paired``. A layer without a probe gets one of
    ``paired``, in turn. Among layers that add equally many traits to a probe, the one with the fewest probes gets it.
    """
    if not probes:
        return (frozenset(),) * len(traits)
    plain = plainest(traits)
    assigned: list[set[str]] = [set() for _ in traits]
    assigned[plain].update(probes)
    pairs = [own | {frozenset(pair) for pair in combinations(own, 2)} for own in traits]
    sets = [[probe for probe in probes if probe in names] for names in alike]
    sets += [[probe] for probe in probes if not any(probe in names for names in alike)]
    for names in filter(None, sets):
        turns = cycle(names)
        owned: Sequence[frozenset[object]] = pairs if names[0] in paired else traits
        missing = frozenset().union(*owned) - owned[plain]
        while missing:
            gains = [len(missing & own) for own in owned]
            best = min(range(len(owned)), key=lambda index: (-gains[index], len(assigned[index])))
            assigned[best].add(next(turns))
            missing -= owned[best]
    enough = [probe for probe in probes if probe in paired] or probes
    for number, own in enumerate(own for own in assigned if not own):
        own.add(enough[number % len(enough)])
    return tuple(map(frozenset, assigned))
