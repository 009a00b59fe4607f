"""The pages of the site: a matrix for each device, a page for each backend, the cases, the runs, and badges."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib import resources
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from attncheck.errors import MissingExtraError
from attncheck.reports.analysis import phrases
from attncheck.reports.analysis.measured import (
    LEVEL,
    MeasuredBackend,
    MeasuredCase,
    MeasuredRun,
    Subject,
    paces,
    slug,
    subjects,
)
from attncheck.reports.analysis.recommendation import (
    ORDER,
    RULES,
    STANDING_OF,
    STANDINGS,
    Standing,
    known_needs,
    need_answer,
)
from attncheck.reports.document.blocks import Sign
from attncheck.reports.document.support import SIGNS as MEASURED_SIGNS
from attncheck.reports.html.records import clean_json

if TYPE_CHECKING:
    from jinja2 import Environment

T = TypeVar("T")

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'"
"""The content security policy: nothing from elsewhere, no inline script or style."""

FORMS: Mapping[str, str] = {
    "dtype": "dtype",
    "kv_cache_dtype": "KV cache dtype",
    "head_size": "head size",
    "block_size": "page size",
    LEVEL: "CUDA graphs",
    "batch": "batch",
}
"""Headings of the forms that a reader selects by value. All but the last are columns."""

LEVELS = {"UNIFORM_SINGLE_TOKEN_DECODE": "1 token", "UNIFORM_BATCH": "uniform", "ALWAYS": "always"}
"""Short names of CUDA-graph levels."""

FIRST_FEATURES = ("sliding_window", "logits_soft_cap", "sinks", "alibi", "mla", "lse", "fp8_kv")
"""The first columns of features; the others follow by name."""

PRESETS: Mapping[str, tuple[str, ...]] = {
    "gpt-oss: sinks, window, head 64": ("sinks", "sliding_window", "head_size=64", "dtype=bfloat16"),
    "Llama 3: head 128, pages of 16": ("head_size=128", "block_size=16", "dtype=bfloat16"),
    "Gemma 2: cap, window, head 256": ("logits_soft_cap", "sliding_window", "head_size=256", "dtype=bfloat16"),
    "DeepSeek: MLA": ("mla", "dtype=bfloat16"),
    "FP8 cache in CUDA graphs": ("fp8_kv", f"{LEVEL}=UNIFORM_SINGLE_TOKEN_DECODE"),
}
"""Needs of models. The size of a window is no need: cases of any window count."""


SIGNS: Mapping[str, Sign] = {
    **{str(verdict): sign for verdict, sign in MEASURED_SIGNS.items()},
    "unreached": Sign("\u2026", "warn", "not reached: the run ended before"),
}
"""By verdict of a need."""

TONES: Mapping[Standing, str] = {
    "wrong": "bad",
    "right": "good",
    "right in each": "warn",
    "not declared": "warn",
    "refused": "calm",
    "not reached": "warn",
    "not examined": "none",
}

_LONGEST_SENTENCE, _LONGEST_NAME = 600, 160
"""Maximum characters of a sentence in a table, and of a name; the pages of runs show all of them."""

_PER_CHARACTER, _MARGIN, _HEIGHT = 6.6, 14, 20
_LONGEST = 40
"""Measures of a badge in pixels, and the maximum characters of its label."""

_COLOURS: Mapping[str, str] = {"good": "#1b6b35", "warn": "#7a5600", "bad": "#a3231a", "none": "#5b6270"}
"""Colours of badges, by tone."""


class Verdict(NamedTuple):
    """The verdict on a backend on a device: a word, its colour, and figures."""

    word: str
    tone: str
    figures: str


@dataclass(frozen=True)
class Site:
    """All runs of a site, newest first, and what they come to. ``unread``: why files were left out, by name."""

    runs: tuple[MeasuredRun, ...]
    unread: Mapping[str, str]
    reloads: bool = False

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Every backend on every device that a run examined, GPUs first."""
        return tuple(subject for subject in subjects(self.runs) if subject.runs[0][1].is_examined)

    @cached_property
    def sources(self) -> frozenset[str]:
        """The keys of the runs with a page: those that a current result is from."""
        return frozenset(key for subject in self.subjects for key in subject.sources)

    @cached_property
    def by_backend(self) -> dict[str, tuple[Subject, ...]]:
        """The subjects of each backend, by name."""
        return dict(sorted(_grouped(self.subjects, lambda subject: subject.name).items()))

    @cached_property
    def by_device(self) -> dict[str, tuple[Subject, ...]]:
        """The subjects of each device, GPUs first."""
        return _grouped(self.subjects, lambda subject: subject.device)

    @property
    def device_pages(self) -> dict[str, str]:
        """The page of each device's matrix; that of the first one is the first page."""
        return {
            device: f"devices/{slug(device)}.html" if number else "index.html"
            for number, device in enumerate(self.by_device)
        }

    @property
    def cases(self) -> list["CaseLine"]:
        """All cases, those that most backends get wrong first."""
        described: dict[str, tuple[str, str]] = {}
        for run in reversed(self.runs):
            described |= run.described
        found: dict[str, dict[Standing, list[Subject]]] = {}
        for subject in self.subjects:
            for name, case in subject.cases.items():
                found.setdefault(name, {}).setdefault(STANDING_OF[case.counted.count], []).append(subject)
        lines = [CaseLine(name, *described.get(name, ("", "")), found[name]) for name in sorted(found)]
        return sorted(lines, key=lambda line: -len(line.standings.get("wrong", ())))


class CaseLine(NamedTuple):
    """A case, its shape and description, and the subjects by their standing in it."""

    name: str
    shape: str
    description: str
    standings: Mapping[Standing, Sequence[Subject]]


def site_files(site: Site) -> Iterator[tuple[str, str]]:
    """Yield path and text of every file of the site but the pages of its runs.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    environment = _environment()
    environment.globals |= {
        "site": site,
        "policy": POLICY + ("; connect-src 'self'" if site.reloads else ""),
        "signs": SIGNS,
        "presets": PRESETS,
        "headings": FORMS,
        "levels": LEVELS,
        "verdict": verdict,
        "answer": need_answer,
        "history": history,
        "badge_name": badge_name,
    }

    def page(path: str, template: str, **values: Any) -> tuple[str, str]:
        root = "../" * path.count("/")
        return path, environment.get_template(template).render(root=root, path=path, **values)

    for device, path in site.device_pages.items():
        members = site.by_device[device]
        needs = known_needs(members)
        values = {"forms": forms(needs), "features": features(needs), "data": _data_block(matrix_data(members, needs))}
        yield page(path, "matrix.html", device=device, members=members, **values)
    if not site.by_device:
        yield page("index.html", "runs.html")  # no backend was examined
    for name, own in site.by_backend.items():
        yield page(f"backends/{slug(name)}.html", "backend.html", name=name, members=own)
        for subject in own:
            yield f"badges/{badge_name(subject)}", badge(subject)
    yield page("cases.html", "cases.html")
    yield page("runs.html", "runs.html")
    yield "site.css", _text("attncheck.reports.html", "page.css") + _text(__package__, "site.css")
    for name in ("site.js", "icon.svg"):
        yield name, _text(__package__, name)


def _environment() -> "Environment":
    """Return the templates' environment, which escapes every text and cleans it of control characters."""
    if find_spec("jinja2") is None:
        raise MissingExtraError("attncheck site", "jinja2", "report")
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return phrases.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters |= {
        "brief": lambda text: phrases.cut(phrases.one_line(text), _LONGEST_SENTENCE),
        "day": lambda started: started[:10],
        "name": lambda text: phrases.cut(phrases.one_line(text), _LONGEST_NAME),
        "plural": phrases.plural,
        "slug": slug,
    }
    return environment


def forms(needs: Sequence[str]) -> dict[str, list[str]]:
    """Return the needs of each form in :data:`FORMS`."""
    found = {form: [need for need in needs if need.startswith(f"{form}=")] for form in FORMS}
    return {form: own for form, own in found.items() if own}


def features(needs: Sequence[str]) -> list[str]:
    """Return the features, those of :data:`FIRST_FEATURES` first."""
    found = [need for need in needs if "=" not in need]
    first = [feature for feature in FIRST_FEATURES if feature in found]
    return first + [feature for feature in found if feature not in first]


def matrix_data(members: Sequence[Subject], needs: Sequence[str]) -> dict[str, Any]:
    """Return what the script needs to answer a combination of needs, with standings, needs and sets as positions.

    ``sets``: sets of needs. ``backends``, in the order of ``members``: the standing of each need alone, and each case
    as ``[set, standing, every, one, ratio, low, high]``; the last three are missing without a pace. The case counts if
    all needs of the set ``every`` and one of the set ``one`` are selected, as in :meth:`MeasuredCase.counts_for`.
    """
    position = {need: number for number, need in enumerate(needs)}
    relative = paces(members)
    sets: dict[tuple[int, ...], int] = {}

    def number_of(own: Iterable[str]) -> int:
        return sets.setdefault(tuple(sorted(position[need] for need in own if need in position)), len(sets))

    def row(subject: Subject, name: str, case: MeasuredCase) -> list[float | None]:
        pace = relative.get((subject.name, name))
        standing = ORDER.index(STANDING_OF[case.counted.count])
        figures = [None if each is None else float(f"{each:.4g}") for each in pace] if pace else []
        is_declared = case.counted.count in ("right", "left", "short")
        every, one = (case.blamed, ()) if case.counted.count == "short" else ((), () if is_declared else case.blamed)
        return [number_of(case.needs), standing, number_of(every), number_of(one), *figures]

    backends = [
        {
            "alone": [ORDER.index(need_answer(subject, need).standing) for need in needs],
            "cases": [row(subject, name, case) for name, case in subject.cases.items() if case.can_count],
        }
        for subject in members
    ]
    return {
        "needs": needs,
        "standings": [[STANDINGS[standing], TONES[standing]] for standing in ORDER],
        "rules": [[which, ORDER.index(standing)] for which, standing in RULES],
        "right": ORDER.index("right"),
        "each": ORDER.index("right in each"),
        "last": ORDER.index("not examined"),
        "sets": [list(each) for each in sets],
        "backends": backends,
    }


def _data_block(data: object) -> str:
    """Return the data as JSON for a ``<script>`` element, with every ``<`` escaped."""
    return clean_json(data).replace("<", "\\u003c")


def verdict(subject: Subject) -> Verdict:
    """Return the verdict on the current results. A fault is wrong whether the run expected it or not."""
    right, wrong = subject.counts["right"], subject.wrong
    figures = [phrases.plural(right, "case") + " right", *([f"{wrong} wrong"] if wrong else [])]
    figures += [subject.coverage] if subject.is_stopped else []
    if wrong or subject.faults:
        known = "wrong (known)" if subject.faults and all(each.is_known for each in subject.faults) else "wrong"
        return Verdict(known, "bad", ", ".join([phrases.plural(len(subject.faults), "finding"), *figures]))
    if subject.is_stopped:
        return Verdict(subject.coverage, "warn", figures[0])
    if not right:
        return Verdict("no declared case", "none", subject.coverage)
    return Verdict("right", "good", figures[0])


class Period(NamedTuple):
    """Consecutive runs with one result, newest first."""

    runs: list[MeasuredRun]
    backend: MeasuredBackend


def history(subject: Subject) -> list[Period]:
    """Return the runs of a backend on a device, newest first; those with equal results together."""

    def result(each: tuple[MeasuredRun, MeasuredBackend]) -> tuple[object, ...]:
        _, backend = each
        return backend.version, backend.words, backend.is_whole, tuple(finding.words for finding in backend.findings)

    groups = [list(members) for _, members in groupby(subject.runs, key=result)]
    return [Period([run for run, _ in members], members[0][1]) for members in groups]


def badge_name(subject: Subject) -> str:
    """Return the file name of the badge."""
    return f"{slug(f'{subject.name} on {subject.device}')}.svg"


def badge(subject: Subject) -> str:
    """Return the badge: ``attncheck``, the device, and the verdict with its figures."""
    found = verdict(subject)
    level = f", {subject.level} measured" if subject.level and found.tone == "good" else ""
    marks = f" ({', '.join(subject.marks)})" if subject.marks else ""
    text = (found.figures if found.tone == "good" else f"{found.word}: {found.figures}") + level + marks
    return draw_badge(f"attncheck on {subject.device}", text, found.tone)


def draw_badge(label: str, text: str, tone: str) -> str:
    """Return a badge as SVG. ``tone``: good, warn, bad or none."""
    label, text = phrases.cut(phrases.one_line(label), _LONGEST), phrases.one_line(text)
    left, right = (round(_PER_CHARACTER * len(part) + _MARGIN) for part in (label, text))
    label_and_text = escape(f"{label}: {text}")
    width, text_width = left + right, right - _MARGIN
    size = f'width="{width}" height="{_HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{label_and_text}">
<title>{label_and_text}</title>
<rect {size} rx="3" fill="{_COLOURS[tone]}"/>
<rect width="{left}" height="{_HEIGHT}" rx="3" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{_MARGIN // 2}" y="14" textLength="{left - _MARGIN}">{escape(label)}</text>
<text x="{left + _MARGIN // 2}" y="14" textLength="{text_width}">{escape(text)}</text>
</g>
</svg>
"""


def _grouped(members: Sequence[T], key: Callable[[T], str]) -> dict[str, tuple[T, ...]]:
    found: dict[str, list[T]] = {}
    for member in members:
        found.setdefault(key(member), []).append(member)
    return {name: tuple(each) for name, each in found.items()}


def _text(package: str, name: str) -> str:
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")
