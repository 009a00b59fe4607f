"""Find what failing cases have in common that passing cases do not have.

A condition holds for every failing case. The result is the smallest set of conditions that no passing case meets
together; among sets of one size, the one that is simplest to read. Pure functions of the keys of cases.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from attncheck.reports.analysis.reasons import named

Value = bool | int | float | str | None
Keys = Mapping[str, Value]
"""The keys of one case; a missing key has the value None, shown as "not given"."""

_MOST_VALUES = 4
"""Maximum number of values that a condition lists."""

_MOST_LENGTHS = 2

_MOST_CONDITIONS = 3

_TRIED = 60
"""Maximum number of conditions that are combined with each other; the easiest to read are taken."""

_SHOWN = 3
"""Maximum number of other single conditions that are shown; the rest are counted."""

_GIVEN = "given"

_LENGTHS = ("batch.num_", "batch.max_", "batch.min_")

_ORDER = ("layer.", "cache.", "path", "inputs", "batch ", "batch.padding", "batch.")
"""Prefixes of keys, best explanation first: a modifier of the layer explains more than a length."""

_SIZES = ("layer.num_heads", "layer.num_kv_heads", "layer.group_size", "layer.head_size", "layer.dtype")
"""Keys that every layer has; they rank after keys that only some layers have, the dtype after all other keys."""


@dataclass(frozen=True)
class Condition:
    """One key and the values it has in the failing cases.

    ``bound``: ``at least`` or ``at most`` for a limit on a number, ``given`` if the key is present; empty if the key
    has one of ``values``. ``others``: the values of the key in the passing cases, sorted.
    """

    key: str
    values: tuple[Value, ...]
    bound: str = ""
    others: tuple[Value, ...] = ()

    def holds(self, keys: Keys) -> bool:
        """Return whether a case with these keys meets the condition."""
        value = keys.get(self.key)
        if self.bound == _GIVEN:
            return value is not None
        if not self.bound:
            return any(_is_same(value, each) for each in self.values)
        if isinstance(value, str | bool) or value is None:
            return False
        (limit,) = self.values
        assert isinstance(limit, int | float)
        return value >= limit if self.bound == "at least" else value <= limit

    @property
    def cost(self) -> float:
        """How hard the condition is to read, in units of a condition with one value."""
        if self.key == "layer.dtype":  # few faults depend on it, and every case has one
            return 1.5 + 0.5 * len(self.values)
        if self.bound:
            return 1.0 if self.bound == _GIVEN else 1.2
        if self.key.startswith(_LENGTHS):  # an exact length, or a list of them, is rarely the reason; a bound may be
            return 0.3 + len(self.values)
        return 1 + 0.5 * (len(self.values) - 1)

    def __str__(self) -> str:
        if self.bound == _GIVEN:
            return f"{self.key} is given"
        if len(self.values) == 1 and self.values[0] is True:
            return self.key if " " in self.key else f"{self.key} is given"
        if self.values == (None,):
            has = "batch has a "
            return self.key.replace(has, "batch has no ") if self.key.startswith(has) else f"{self.key} is not given"
        return f"{self.key} is {f'{self.bound} ' if self.bound else ''}{_listed(self.values)}"


@dataclass(frozen=True)
class Contrast:
    """Conditions that hold in all ``wrong`` cases, and together in ``exceptions`` of the ``right`` ones.

    ``alternatives``: other single conditions that separate the cases equally well, the simplest first.
    """

    conditions: tuple[Condition, ...]
    wrong: int
    right: int
    exceptions: int = 0
    alternatives: tuple[Condition, ...] = ()

    @property
    def cost(self) -> float:
        """How hard the conditions are to read, the sum of their costs."""
        return sum(condition.cost for condition in self.conditions)

    def __str__(self) -> str:
        """Return text such as ``cache.block_size is 1, 8 or 128 in all 4 that fail; 16 in all 30 that pass``."""
        text = " and ".join(map(str, self.conditions))
        text += " in the one case that fails" if self.wrong == 1 else f" in all {self.wrong} that fail"
        others = self.conditions[0].others
        is_bare = len(others) == 1 and (others[0] is None or others[0] is True)  # not ==, since 1 equals True
        passing = "the one that passes" if self.right == 1 else f"all {self.right} that pass"
        if self.exceptions:
            text += f"; in {self.exceptions} of {self.right} that pass"
        elif len(self.conditions) == 1 and len(others) <= 2 and not is_bare:
            text += f"; {_listed(others)} in {passing}"
        else:
            text += "; in none that passes" if self.right > 1 else "; not in the one that passes"
        alternatives = named([str(condition) for condition in self.alternatives], _SHOWN, "; ")
        return f"{text} (other differences: {alternatives})" if alternatives else text


def contrast_of(wrong: Sequence[Keys], right: Sequence[Keys]) -> Contrast | None:
    """Return what separates the failing cases from the passing ones, or None if nothing does or no case passes.

    If no set of up to three conditions excludes every passing case, return the condition that excludes most. It must
    exclude at least nine of ten.
    """
    if not wrong or not right:
        return None
    found = sorted(_conditions(wrong, right), key=_rank)[:_TRIED]
    hold = [_mask(condition, right) for condition in found]
    for count in range(1, _MOST_CONDITIONS + 1):
        clean = [
            chosen
            for chosen in combinations(range(len(found)), count)
            if not _together(hold, chosen) and (count == 1 or _needs_all(hold, chosen))
        ]
        if clean:
            best = min(clean, key=lambda chosen: (sum(found[i].cost for i in chosen), chosen))
            chosen = tuple(found[i] for i in best)
            others = {found[i].key: found[i] for (i, *_) in reversed(clean) if found[i].key != chosen[0].key}
            shown = sorted(others.values(), key=_rank) if count == 1 else []
            return Contrast(chosen, len(wrong), len(right), alternatives=tuple(shown))
    nearest = min(range(len(found)), key=lambda i: (hold[i].bit_count(), i), default=None)
    if nearest is None or hold[nearest].bit_count() * 10 > len(right):
        return None
    return Contrast((found[nearest],), len(wrong), len(right), exceptions=hold[nearest].bit_count())


def parts_of(wrong: Sequence[Keys], right: Sequence[Keys]) -> list[tuple[Contrast, list[int]]]:
    """Split failing cases into groups that one value of one key each separates from the passing cases.

    Return (contrast, positions in ``wrong``) for two to four groups that cover all failing cases, or an empty list if
    there are no such groups.
    """
    names = sorted({key for keys in wrong for key in keys})
    values = [(key, value) for key in names for value in _values(wrong, key) if value is not None]
    single = [Condition(key, (value,), others=_values(right, key)) for key, value in values]
    clean = sorted((each for each in single if not _mask(each, right)), key=_rank)
    left = set(range(len(wrong)))
    groups: list[tuple[Contrast, list[int]]] = []
    while left and clean and len(groups) < _MOST_VALUES:
        best = max(clean, key=lambda each: sum(each.holds(wrong[i]) for i in left))
        members = [i for i in sorted(left) if best.holds(wrong[i])]
        if not members:
            return []
        left -= set(members)
        groups.append((Contrast((best,), len(members), len(right)), members))
    return groups if not left and len(groups) > 1 else []


def _conditions(wrong: Sequence[Keys], right: Sequence[Keys]) -> Iterator[Condition]:
    """Yield every condition that all failing cases meet and at least one passing case does not."""
    for key in sorted({key for keys in (*wrong, *right) for key in keys}):
        values, others = _values(wrong, key), _values(right, key)
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        is_numeric = len(numbers) == len(values)
        most = _MOST_LENGTHS if key.startswith(_LENGTHS) else _MOST_VALUES
        found = [Condition(key, values, others=others)] if len(values) <= most else []
        if None in values and len(values) > 1:
            found = []
        if None not in values and None in others and len(values) > 1:
            found.append(Condition(key, (), _GIVEN, others))
        if is_numeric and len(wrong) > 1:
            found += [
                Condition(key, (min(numbers),), "at least", others),
                Condition(key, (max(numbers),), "at most", others),
            ]
        yield from (each for each in found if not all(each.holds(keys) for keys in right))


def _values(cases: Iterable[Keys], key: str) -> tuple[Value, ...]:
    found = {(isinstance(value := keys.get(key), bool), value) for keys in cases}
    return tuple(sorted((value for _, value in found), key=_sorting))


def _is_same(one: Value, other: Value) -> bool:
    """Return whether two values are equal; unlike ``==``, True differs from 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _sorting(value: Value) -> tuple[int, float, str]:
    """Return a sort key: None first, then numbers by size, then strings."""
    if value is None or isinstance(value, str):
        return (0, 0.0, "") if value is None else (2, 0.0, value)
    return 1, float(value), ""


def _rank(condition: Condition) -> tuple[float, int, str]:
    place = next((i for i, start in enumerate(_ORDER) if condition.key.startswith(start)), len(_ORDER))
    if condition.key in _SIZES:
        place = 2 if condition.key == "layer.group_size" else 3
    if condition.values == (None,):
        place += len(_ORDER)  # a key that is not given explains least
    return condition.cost, place, condition.key


def _mask(condition: Condition, cases: Sequence[Keys]) -> int:
    """Return a bit mask of the cases that meet the condition."""
    return sum(1 << position for position, keys in enumerate(cases) if condition.holds(keys))


def _together(masks: Sequence[int], chosen: Sequence[int]) -> int:
    mask = -1
    for index in chosen:
        mask &= masks[index]
    return mask


def _needs_all(masks: Sequence[int], chosen: Sequence[int]) -> bool:
    return all(_together(masks, [other for other in chosen if other != index]) for index in chosen)


def _listed(values: Sequence[Value]) -> str:
    words = ["not given" if value is None else str(value) for value in values]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
