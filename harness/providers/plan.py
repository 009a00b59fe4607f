"""Resolve names and patterns to the questions for each provider."""

import importlib.metadata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch

from attncheck.cases.model import Case
from attncheck.errors import SelectionError
from attncheck.harness.providers.batches import ALWAYS, batches_of, drawn_batches, has_hypothesis
from attncheck.harness.providers.provider import Provider, load_provider
from attncheck.harness.providers.questions import Subject, SubjectSetting
from attncheck.harness.providers.subjects import SUBJECTS
from attncheck.reports.analysis.phrases import plural


@dataclass(frozen=True)
class ProviderPlan:
    """Every subject of every provider, in one setting. ``notes``: where the batches come from."""

    providers: tuple[Provider, ...] = ()
    subjects: tuple[Subject, ...] = ()
    setting: SubjectSetting = field(default_factory=lambda: SubjectSetting((), torch.device("cpu")))
    notes: tuple[str, ...] = ()


def plan_providers(
    refs: Sequence[str], patterns: Sequence[str], cases: Iterable[Case], device: str, seed: int
) -> ProviderPlan:
    """Return the plan for providers ``refs`` and the functions that match one of ``patterns`` (all if empty).

    The plan is empty if ``refs`` is empty.

    Raises:
        QuestionError: a provider cannot be imported, two have the same name, or a pattern matches nothing.
    """
    if not refs:
        return ProviderPlan()
    providers = tuple(load_provider(ref) for ref in dict.fromkeys(refs))
    names = [provider.name for provider in providers]
    for name in names:
        if names.count(name) > 1:
            raise SelectionError(f"two of the providers are called {name!r}; examine them in two runs")
    written = batches_of(cases)
    drawn = drawn_batches(seed) if has_hypothesis() else []
    setting = SubjectSetting((*ALWAYS, *written, *drawn), torch.device(device))
    sources = [f"{len(ALWAYS)} always used", f"{len(written)} of the suites"]
    if drawn:
        sources.append(f"{len(drawn)} drawn by hypothesis {importlib.metadata.version('hypothesis')}")
    notes = [f"utilities are called with {len(setting.batches)} batches: {', '.join(sources)}"]
    if not drawn:
        notes.append("hypothesis is not installed (pip install 'attncheck[fuzz]'): no batch was drawn")
    return ProviderPlan(
        providers, _matching(patterns), setting, (*notes, *(note for each in providers for note in _age(each)))
    )


def _matching(patterns: Sequence[str]) -> tuple[Subject, ...]:
    keys = [subject.key for subject in SUBJECTS]
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in keys):
            near = get_close_matches(pattern, keys, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SelectionError(f"no function matches {pattern!r}{hint}")
    return tuple(s for s in SUBJECTS if not patterns or any(fnmatchcase(s.key, pattern) for pattern in patterns))


def _age(provider: Provider) -> list[str]:
    """Return a note if the table of departures was made from another version of the provider."""
    made_from = provider.departures.version
    if not made_from or made_from == provider.version:
        return []
    known = plural(len(provider.departures.known), "known departure")
    return [f"the {known} of {provider.name} were found in {made_from}, and this is {provider.version}"]
