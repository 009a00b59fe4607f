"""Write the pages of the site: one for each backend, device and case, and those that answer questions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from attncheck.reports.analysis import phrases
from attncheck.reports.document.support import SIGNS
from attncheck.reports.site.chunks import device_chunk, index_chunk, script
from attncheck.reports.site.current import CaseCounts, CurrentCase, Subject, history, subjects
from attncheck.reports.site.environment import template_environment
from attncheck.reports.site.model import SiteRun, slug

T = TypeVar("T")

SCRIPTS = ("dom.js", "rules.js")
"""Scripts that the HTML report has, too."""

FOLDERS = ("backends", "devices", "cases", "badges", "data")
"""Folders whose files depend on the runs."""

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'"
"""The content security policy: nothing from elsewhere, nothing inline."""


_PER_CHARACTER, _MARGIN, _HEIGHT = 6.6, 14, 20
_LONGEST = 40
"""Measures of a badge in pixels, and the maximum characters of its label."""

_RIGHT, _KNOWN, _WRONG, _NONE = "#1b6b35", "#7a5600", "#a3231a", "#5b6270"
"""Colours of a badge without findings, with expected ones only, with others, and without a right case."""


class SiteFile(NamedTuple):
    """A file of the site, by its path from the site's folder."""

    path: str
    text: str


class CaseAnswer(NamedTuple):
    """The current result of a case for one backend on one device."""

    subject: Subject
    current: CurrentCase


@dataclass(frozen=True)
class Site:
    """All runs of a site, newest first, and what they come to. ``unread``: why files were left out, by name."""

    runs: tuple[SiteRun, ...]
    unread: Mapping[str, str]
    reloads: bool = False

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Every backend on every device."""
        return subjects(self.runs)

    @cached_property
    def by_backend(self) -> dict[str, tuple[Subject, ...]]:
        """The subjects of each backend."""
        return _grouped(self.subjects, lambda subject: subject.name)

    @cached_property
    def by_device(self) -> dict[str, tuple[Subject, ...]]:
        """The subjects of each device, GPUs first."""
        grouped = _grouped(self.subjects, lambda subject: subject.device)
        return dict(sorted(grouped.items(), key=lambda item: (self.generation(item[0]) == "CPU", item[0])))

    @cached_property
    def by_case(self) -> dict[str, tuple[CaseAnswer, ...]]:
        """The current results of each case."""
        found: dict[str, list[CaseAnswer]] = {}
        for subject in self.subjects:
            for name, current in subject.cases.items():
                found.setdefault(name, []).append(CaseAnswer(subject, current))
        return {name: tuple(found[name]) for name in sorted(found)}

    @cached_property
    def by_suite(self) -> dict[str, tuple[str, ...]]:
        """The names of the cases of each suite."""
        return _grouped(tuple(self.by_case), lambda name: name.partition("/")[0])

    def counts(self, case: str) -> CaseCounts:
        """Return how many backends on devices are right, wrong, or neither in a case."""
        return CaseCounts.of(answer.current for answer in self.by_case[case])

    @cached_property
    def descriptions(self) -> dict[str, tuple[str, str]]:
        """Shape and description of each case, from the newest run that has it."""
        found: dict[str, tuple[str, str]] = {}
        for run in reversed(self.runs):
            found |= run.descriptions
        return found

    def generation(self, device: str) -> str:
        """Return the generation of a device."""
        return next(run.generation for run in self.runs if run.device == device)


def site_files(site: Site) -> Iterable[SiteFile]:
    """Yield every file of the site but the chunks of its runs.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    environment = template_environment(__package__, "attncheck site")
    environment.filters |= {"slug": slug, "day": lambda started: started[:10]}
    environment.globals |= {
        "site": site,
        "policy": _policy(site),
        "signs": SIGNS,
        "history": history,
        "badge_text": badge_text,
    }

    def page(path: str, template: str, **values: Any) -> SiteFile:
        root = "../" * path.count("/")
        return SiteFile(path, environment.get_template(template).render(root=root, path=path, **values))

    yield page("index.html", "choose.html")
    for name in ("backends", "devices", "cases", "runs"):
        yield page(f"{name}.html", f"{name}.html")
    for name, members in site.by_backend.items():
        yield page(f"backends/{slug(name)}.html", "backend.html", name=name, subjects=members)
        for subject in members:
            yield SiteFile(f"badges/{subject.badge}", badge(subject))
    for name, members in site.by_device.items():
        yield page(f"devices/{slug(name)}.html", "device.html", name=name, subjects=members)
        yield SiteFile(f"data/device-{slug(name)}.js", script(f"device-{slug(name)}", device_chunk(members)))
    for name, answers in site.by_case.items():
        yield page(f"cases/{slug(name)}.html", "case.html", name=name, answers=answers)
    yield SiteFile("data/index.js", script("index", index_chunk(site.runs, site.subjects)))
    styles = [_text(__package__, "page.css"), _text(__package__, "site.css")]
    yield SiteFile("site.css", "\n".join(styles))
    shared = [_text(__package__, name) for name in SCRIPTS]
    scripts = ['"use strict";', *shared, *(_text(__package__, name) for name in ("site.js", "choose.js"))]
    yield SiteFile("choose.js", "\n".join(scripts))
    for name in ("theme.js", "icon.svg"):
        yield SiteFile(name, _text(__package__, name))
    if site.reloads:
        yield SiteFile("data/reload.js", _text(__package__, "reload.js"))


def _policy(site: Site) -> str:
    return POLICY + ("; connect-src 'self'" if site.reloads else "")


def _grouped(members: Sequence[T], key: Callable[[T], str]) -> dict[str, tuple[T, ...]]:
    found: dict[str, list[T]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return {name: tuple(each) for name, each in found.items()}


def _text(package: str, name: str) -> str:
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def write_file(file: SiteFile, folder: Path) -> None:
    """Write the file into ``folder``; a file whose text is unchanged keeps its time."""
    path = folder / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != file.text:
        path.write_text(file.text, encoding="utf-8")


def badge_text(subject: Subject) -> str:
    """Return what the badge says of the current results, such as ``412 cases right, ALWAYS measured``."""
    cases = f"{phrases.plural(subject.counts.right, 'case')} right"
    if subject.findings:
        kind = "finding" if subject.failing else "known fault"
        return f"{cases}, {phrases.plural(len(subject.failing or subject.findings), kind)}"
    level = f", {subject.level} measured" if subject.level else ""
    return f"{cases}{level}" + (f" ({', '.join(subject.marks)})" if subject.marks else "")


def badge(subject: Subject) -> str:
    """Return the badge: ``attncheck``, the device, and :func:`badge_text`."""
    label = phrases.cut(f"attncheck on {phrases.one_line(subject.device)}", _LONGEST)
    text = badge_text(subject)
    left, right = (round(_PER_CHARACTER * len(part) + _MARGIN) for part in (label, text))
    ground = _WRONG if subject.failing else _KNOWN if subject.findings else _RIGHT if subject.counts.right else _NONE
    label_and_text = escape(f"{label}: {text}")
    width, text_width = left + right, right - _MARGIN
    size = f'width="{width}" height="{_HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label_and_text}">
<title>{label_and_text}</title>
<rect {size} rx="3" fill="{ground}"/>
<rect width="{left}" height="{_HEIGHT}" rx="3" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{_MARGIN // 2}" y="14" textLength="{left - _MARGIN}">{escape(label)}</text>
<text x="{left + _MARGIN // 2}" y="14" textLength="{text_width}">{escape(text)}</text>
</g>
</svg>
"""
