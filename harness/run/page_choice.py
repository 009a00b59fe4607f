"""Selects page sizes and cache layouts for suites whose defaults the backends of a run reject. Loads no torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from attncheck.cases.keys import with_defaults
from attncheck.cases.loader import load_suite
from attncheck.cases.model import Suite
from attncheck.errors import CaseFileError
from attncheck.harness.run.backend_description import BackendDescription
from attncheck.harness.run.selection import Selection

_SMALLEST = 16
"""Smallest page size chosen for a backend that accepts multiples, in tokens."""


def fit_pages(
    selection: Selection, backends: Sequence[BackendDescription], suites: Mapping[str, str]
) -> tuple[Selection, tuple[str, ...]]:
    """Return ``selection`` with defaults that most of ``backends`` accept, and notes on the changes.

    A suite does not change if every backend accepts its defaults. Values set by a case or by ``--set`` never change.
    ``suites``: by reference, the only suite a backend is examined with; a backend without an entry gets every suite.
    """
    able = [each for each in backends if each.is_loaded and not each.unavailable_reasons]
    refs, loaded, notes = list(selection.refs), list(selection.suites), list[str]()
    for index, suite in enumerate(selection.suites):
        examined = [each for each in able if suites.get(each.ref, suite.name) == suite.name]
        examined = [each for each in examined if not each.is_mla] or examined
        chosen = {key: _best(key, value, examined) for key, value in suite.page_defaults.items()}
        changed = [f"{key}={value}" for key, value in chosen.items() if value != suite.page_defaults[key]]
        if changed:
            try:
                ref = with_defaults(refs[index], changed)
                loaded[index] = load_suite(ref)
            except CaseFileError:  # the new defaults are invalid for this suite
                chosen = dict(suite.page_defaults)
            else:
                refs[index] = ref
        notes += _notes(suite, chosen, examined)
    if tuple(refs) == selection.refs:
        return selection, tuple(notes)
    keys = {case.key for case in selection.cases}
    cases = tuple(case for suite in loaded for case in suite.cases if case.key in keys)
    return replace(selection, suites=tuple(loaded), refs=tuple(refs), cases=cases), tuple(notes)


def _best(key: str, default: str, backends: Sequence[BackendDescription]) -> str:
    """Return the value of ``key`` that most backends accept. Ties go to the default, then to the smallest size."""
    if key == "cache.layout":
        values = [default, *(layout for each in backends for layout in each.layouts)]
    else:
        sizes = {size for each in backends for size in each.page_sizes}
        sizes |= {base * -(-_SMALLEST // base) for each in backends for base in each.page_multiples}
        values = [default, *map(str, sorted(sizes))]
    return max(values, key=lambda value: sum(_takes(each, key, value) for each in backends))


def _takes(backend: BackendDescription, key: str, value: str) -> bool:
    if key == "cache.layout":
        return not backend.layouts or value in backend.layouts
    sizes, multiples = backend.page_sizes, backend.page_multiples
    is_unknown = not sizes and not multiples
    return is_unknown or int(value) in sizes or any(int(value) % base == 0 for base in multiples)


def _notes(suite: Suite, chosen: Mapping[str, str], backends: Sequence[BackendDescription]) -> list[str]:
    notes, defaults = [], suite.page_defaults
    changed = [key for key, value in chosen.items() if value != defaults[key]]
    if changed:
        what = ", ".join(f"{key}={chosen[key]} instead of {defaults[key]}" for key in changed)
        names = [each.name for each in backends if not all(_takes(each, key, defaults[key]) for key in changed)]
        notes.append(f"suite {suite.name}: {what}, for {', '.join(names)}; --set chooses others")
    unfit = [each.name for each in backends if not all(_takes(each, key, value) for key, value in chosen.items())]
    if unfit:
        what = ", ".join(f"{key}={value}" for key, value in chosen.items())
        notes.append(
            f"suite {suite.name}: {', '.join(unfit)} does not take {what}; in a run of its own others are chosen"
        )
    return notes
