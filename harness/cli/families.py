"""Expands references such as ``vllm:*`` to the backends of the library that can run here."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from attncheck.errors import BackendLoadError
from attncheck.harness.cli.run_options import RunOptions
from attncheck.harness.run.selection import Selection
from attncheck.reports.run_file.header import SurveyedBackend

_ALL = ":*"
"""Suffix of a reference to all backends of a family."""


def with_families(options: RunOptions, selection: Selection) -> tuple[RunOptions, tuple[SurveyedBackend, ...]]:
    """Return the options with each ``NAME:*`` expanded, and a survey of all backends of these families.

    Raises:
        QuestionError: there is no such family, its library cannot be imported, or none of its backends can run here.
    """
    refs: dict[str, None] = {}
    surveyed: list[SurveyedBackend] = []
    for ref in options.backends:
        if not ref.endswith(_ALL):
            refs[ref] = None
            continue
        from attncheck.harness.workers.survey import survey

        limit = options.worker_settings.limits.of_loading
        found = survey(ref.removesuffix(_ALL), options.device, selection.device_wishes, limit)
        able = [each.name for each in found if not each.reason]
        if not able:
            raise BackendLoadError(
                ref, f"none of its {len(found)} backends can run here", allowed="; ".join(_left(found))
            )
        refs.update(dict.fromkeys(able))
        surveyed += found
    return (replace(options, backends=tuple(refs)) if surveyed else options), tuple(surveyed)


def survey_notes(surveyed: Sequence[SurveyedBackend]) -> tuple[str, ...]:
    """Return the number of backends of the families that can run, and for each reason the backends that cannot."""
    if not surveyed:
        return ()
    able = sum(not each.reason for each in surveyed)
    return (f"{able} of {len(surveyed)} backends of {_family(surveyed)} can run here", *_left(surveyed))


def _family(surveyed: Sequence[SurveyedBackend]) -> str:
    return ", ".join(dict.fromkeys(each.name.partition(":")[0] + _ALL for each in surveyed))


def _left(surveyed: Sequence[SurveyedBackend]) -> Iterator[str]:
    """Yield a line for each reason, with the backends that cannot run because of it."""
    names: dict[str, list[str]] = {}
    for each in surveyed:
        if each.reason:
            own = each.name.partition(":")[2]
            names.setdefault(each.reason.replace(own, "it"), []).append(own)
    yield from (f"not examined: {', '.join(own)}: {reason}" for reason, own in names.items())
