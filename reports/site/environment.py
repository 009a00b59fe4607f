"""The template environment of pages: it escapes and cleans every text."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from attncheck.errors import MissingExtraError
from attncheck.reports.analysis import phrases

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

EXTRA = "report"

LONGEST, LONGEST_NAME = 600, 160
"""Maximum characters of a sentence in a table, and of a name; records show all of them."""


def template_environment(package: str, what: str, *libraries: str) -> "Environment":
    """Return the environment for the templates in the folder ``templates`` of ``package``.

    Raises:
        MissingExtraError: jinja2 or one of ``libraries``, which ``what`` needs, is not installed.
    """
    for needed in ("jinja2", *libraries):
        if find_spec(needed) is None:
            raise MissingExtraError(what, needed, EXTRA)
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def finalize(value: object) -> object:
        return phrases.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=finalize,
    )
    environment.filters |= {
        "breakable": _breakable,
        "name": lambda text: phrases.cut(phrases.one_line(text), LONGEST_NAME),
        "brief": lambda text: phrases.cut(phrases.one_line(text), LONGEST),
        "plural": phrases.plural,
        "sentence": phrases.sentence,
    }
    return environment


def _breakable(text: str) -> "Markup":
    """Return a name as markup with possible line breaks after its underscores."""
    from markupsafe import Markup, escape

    return Markup("_<wbr>").join(map(escape, phrases.one_line(text).split("_")))
