"""Which probes each layer and cache of a run plays, so that all of them together cover what a fault may depend on.

A fault of graphs depends on a probe and, often, on one trait of a layer or its cache: a window, a dtype, a page size.
So every pair of a trait and a probe is played somewhere, and not every probe on every layer; of probes that differ in a
number alone, a trait meets one. The first probes of each level are played on every pair of traits as well, such as a
window in pages of 32 tokens. A fault that needs more is missed where no layer with all of it plays the probe that shows
it.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import combinations, cycle

from attncheck.reference.spec import CacheSpec, LayerSpec

Trait = tuple[str, object]
"""A name and its value, such as ``("dtype", "float16")``."""


def traits_of(layer: LayerSpec, cache: CacheSpec) -> frozenset[Trait]:
    """Return the traits that decide which code of a backend runs.

    Numbers that change values alone are no traits: the size of a window, a scale. Neither are head sizes and groups:
    every layer plays a probe, so one is played of every size.
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
        "mla": layer.mla is not None,
        "output_quant": layer.output_quant is not None,
        "scales per head": any(isinstance(scale, tuple) for scale in (cache.k_scale, cache.v_scale, cache.q_scale)),
    }
    return frozenset(traits | {(name, True) for name, holds in is_on.items() if holds})


def plainest(traits: Sequence[frozenset[Trait]]) -> int:
    """Return the index of the layer with the fewest traits; of several, of the one with the commonest, then the first.

    What breaks there is expected of all others, so it is the layer that has most in common with them.
    """
    layers = Counter(trait for own in traits for trait in own)
    return min(range(len(traits)), key=lambda index: (len(traits[index]), -sum(layers[each] for each in traits[index])))


def assign_probes(
    traits: Sequence[frozenset[Trait]],
    probes: Sequence[str],
    paired: Collection[str] = (),
    alike: Collection[Collection[str]] = (),
) -> tuple[frozenset[str], ...]:
    """Return the probes that each layer plays: all of them the plainest one, at least one every other.

    Every trait of any layer meets every probe, and one probe of each set in ``alike``; those of a set take turns. Every
    pair of traits that a layer has meets the probes in ``paired``, and layers that no other probe needs play these in
    turn. Of layers that add as much to a probe, the one with the fewest probes so far takes it.
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
