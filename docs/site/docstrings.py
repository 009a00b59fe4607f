"""Docstrings as Markdown: roles of Sphinx become code, and doctests are fenced. Griffe applies it to each docstring."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr):`~?([^`]*)`")
_DOCTEST = re.compile(r"^( *)>>> (?:.*\n?)(?:^ *\S.*\n?)*", re.MULTILINE)


def plain(text: str) -> str:
    """Return the text with each role of Sphinx, such as ``:class:`Case` ``, as Markdown code."""
    return _ROLE.sub(r"`\1`", text)


def fenced(text: str) -> str:
    """Return the text with a fence around each doctest, which ends at a blank line."""
    return _DOCTEST.sub(lambda match: f"{match[1]}```pycon\n{match[0].rstrip()}\n{match[1]}```\n", text)


class MarkdownDocstrings(griffe.Extension):
    """Change docstrings as griffe reads them, before mkdocstrings parses their sections."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(plain(obj.docstring.value))
