"""What is wrong with the words of a command line, in one line like every other error.

The option parser names neither the value it was given nor, in pydantic's words, what would be right.
"""

import re
from typing import Any

_INVALID = re.compile(r"Invalid value for '?(?P<name>[^':]+)'?: (?P<reason>.*)", re.DOTALL)


HELP = "Usage: "
"""Begins the help that a command without words prints in place of an error."""


def usage_error_in_words(error: Any) -> str | None:
    """Return the line for an error of the option parser, without ``error:``; None for any other exception.

    The parser's class is one of typer's or of click's, by the version of typer.
    """
    if not hasattr(error, "format_message"):
        return None
    message = str(error.format_message()).rstrip(".")
    if message.startswith(HELP):
        return message
    if match := _INVALID.fullmatch(message):
        message = f"{match['name']}: {_reason(error) or match['reason']}"
    else:
        message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message}; see `{context.command_path} --help`"


def _reason(error: Any) -> str | None:
    """What pydantic found wrong with a value; None where another one looked at it."""
    from pydantic import ValidationError

    from attncheck.cases.validation import wanted

    if not isinstance(error.__cause__, ValidationError):
        return None
    details = error.__cause__.errors(include_url=False)[0]
    own = details.get("ctx", {}).get("error")
    return f"must be {wanted(details)} (found {details['input']!r})" if own is None else str(own).rstrip(".")
