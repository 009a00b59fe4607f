"""Data of the site's scripts, in files that a page loads when it needs them.

A page that is opened as a file may not fetch others, but may run scripts. So each chunk is a script that calls
``chunk(name, data)``. All texts are cleaned; they become text nodes, never markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attncheck.reports.analysis.recommendation import STANDINGS
from attncheck.reports.html.records import clean_json
from attncheck.reports.run_file.graph_levels import GRAPH_LEVELS
from attncheck.reports.run_file.records import OUTCOMES
from attncheck.reports.site.current import Subject
from attncheck.reports.site.model import SiteRun, slug

Json = dict[str, Any]


class _Numbers(dict[str, int]):
    """The number of each text, in the order of first use."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def script(name: str, data: object) -> str:
    """Return the script that hands ``data`` to the page that loads it."""
    return f"chunk({clean_json(name)},{clean_json(data)});\n"


def index_chunk(runs: Sequence[SiteRun], subjects: Iterable[Subject]) -> Json:
    """Return what every page with a script needs: the devices, the runs, and the needs that one may select.

    ``devices``: ``[name, generation, chunk]``, those with most backends first. ``runs``: ``[key, name, started, device,
    backends]``, newest first, with indices into ``backends``. ``needs``: of every case. ``standings``: headings by
    standing, best first.
    """
    named: dict[str, set[str]] = {}
    names = _Numbers()
    needs: set[str] = set()
    for subject in subjects:
        named.setdefault(subject.device, set()).add(subject.name)
        needs.update(need for current in subject.cases.values() for need in current.case.needs)
        needs.update(subject.newest.backend.features)
    generations = {run.device: run.generation for run in runs}
    return {
        "devices": [
            [device, generations[device], slug(device)]
            for device in sorted(named, key=lambda device: (generations[device] == "CPU", -len(named[device]), device))
        ],
        "runs": [
            [run.key, run.name, run.started, run.device, [names[each.name] for each in run.backends]] for run in runs
        ],
        "backends": list(names),
        "needs": sorted(needs),
        "standings": dict(STANDINGS),
        "levels": GRAPH_LEVELS,
        "outcomes": OUTCOMES,
    }


def device_chunk(subjects: Sequence[Subject]) -> Json:
    """Return the current results of the backends on one device.

    ``backends``: objects with ``cases``, each ``[case, needs, count, false claims, declared level, level, run,
    time]``: indices into ``cases``, ``needs``, ``texts``, ``needs``, ``texts``, ``texts``, ``runs``, and
    ``[median, low, high, processes]`` in nanoseconds or 0. A value of ``needs`` is a list of names. ``runs``: ``[key,
    started, environment]``. ``answers``: standing and words by need. ``findings``: ``[title, cases]``.
    """
    cases, needs, texts, runs = _Numbers(), _Numbers(), _Numbers(), _Numbers()
    members: dict[str, SiteRun] = {}
    backends = []
    for subject in subjects:
        rows = []
        for name, (case, run) in ((name, (each.case, each.run)) for name, each in subject.cases.items()):
            members[run.key] = run
            own = [cases[name], needs["\n".join(case.needs)], texts[case.count], needs["\n".join(case.false)]]
            levels = [texts[case.declared_level], texts[case.level]]
            rows.append([*own, *levels, runs[run.key], _time(case.time)])
        backends.append(
            {
                "name": subject.name,
                "page": slug(subject.name),
                "version": subject.version,
                "marks": subject.marks,
                "cases": rows,
                "answers": _answers(subject),
                "findings": [
                    [finding.title, [cases[case] for case in finding.cases if case in subject.cases]]
                    for finding, _ in subject.findings
                ],
            }
        )
    return {
        "cases": list(cases),
        "needs": [text.split("\n") if text else [] for text in needs],
        "texts": list(texts),
        "runs": [[members[key].key, members[key].started, members[key].digest] for key in runs],
        "backends": backends,
    }


def _answers(subject: Subject) -> Mapping[str, tuple[str, str]]:
    """Return the results for each need alone; those of an examined case outweigh declarations."""
    found: dict[str, tuple[str, str]] = {}
    for each in subject.current:
        for need, (standing, words) in each.backend.answers.items():
            if need not in found or (found[need][0] not in _EXAMINED and standing in _EXAMINED):
                found[need] = (standing, words)
    return found


_EXAMINED = ("right", "wrong")


def _time(time: tuple[float, float, float, int] | None) -> list[float] | int:
    return 0 if time is None else [float(f"{value:.5g}") for value in time[:3]] + [time[3]]
