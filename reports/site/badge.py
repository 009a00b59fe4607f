"""A badge of one backend on one device, as SVG."""

from html import escape

from attncheck.reports.analysis import phrases
from attncheck.reports.site.current import Subject

_PER_CHARACTER, _MARGIN, _HEIGHT = 6.6, 14, 20
_LONGEST = 40


def badge_text(subject: Subject) -> str:
    """Return what the badge says of the current results, such as ``412 cases, ALWAYS measured``."""
    cases = phrases.plural(
        len([each for each in subject.cases.values() if each.case.count in ("right", "short")]), "case"
    )
    if subject.failing:
        return f"{cases}, {phrases.plural(len(subject.failing), 'finding')}"
    level = f", {subject.level} measured" if subject.level else ""
    return f"{cases}{level}" + (f" ({', '.join(subject.marks)})" if subject.marks else "")


def badge(subject: Subject) -> str:
    """Return the badge: ``attncheck``, the device, and :func:`badge_text`."""
    label = phrases.cut(f"attncheck on {phrases.one_line(subject.device)}", _LONGEST)
    text = badge_text(subject)
    left, right = (round(_PER_CHARACTER * len(part) + _MARGIN) for part in (label, text))
    ground = "#a3231a" if subject.failing else "#1b6b35"
    said = escape(f"{label}: {text}")
    width, text_width = left + right, right - _MARGIN
    size = f'width="{width}" height="{_HEIGHT}"'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{said}">
<title>{said}</title>
<rect {size} rx="3" fill="{ground}"/>
<rect width="{left}" height="{_HEIGHT}" rx="3" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
<text x="{_MARGIN // 2}" y="14" textLength="{left - _MARGIN}">{escape(label)}</text>
<text x="{left + _MARGIN // 2}" y="14" textLength="{text_width}">{escape(text)}</text>
</g>
</svg>
"""
