"""Turns errors of the option parser into one line, in the style of all other errors.

The parser's own message names neither the given value nor, for pydantic types, what is allowed.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_INVALID = re.compile(r"Invalid value for '?(?P<name>[^':]+)'?: (?P<reason>.*)", re.DOTALL)


HELP = "Usage: "
"""Prefix of the help text that a command without arguments prints instead of an error."""


_MEANT: Mapping[str, str] = MappingProxyType(
    {
        "no such command 'test'": "`attncheck run`",
        "no such command 'bench'": "`attncheck run --check timing`",
        "no such command 'diff'": "`attncheck compare`",
        "no such command 'badge'": "`attncheck site`",
        "no such command 'version'": "`attncheck --version`",
        "no such option: --timeout": "--case-timeout for one check of a case, --backend-timeout for a whole backend",
    }
)
"""What to write instead of a command or an option that users expect, by the beginning of the message."""


def usage_error_in_words(error: Any) -> str:
    """Return the error message for a parser error, without ``error:``; return the help text if the error has that."""
    message = str(error.format_message()).rstrip(".")
    if message.startswith(HELP):
        return message
    if match := _INVALID.fullmatch(message):
        message = f"{match['name']}: {_reason(error) or match['reason']}"
    else:
        message = message[:1].lower() + message[1:]
    for beginning, meant in _MEANT.items():
        if message.startswith(beginning):
            message = f"{beginning}; use {meant}"
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message}; see `{context.command_path} --help`"


def _reason(error: Any) -> str | None:
    """Return what pydantic found wrong with a value, or None if pydantic did not raise the error."""
    from pydantic import ValidationError

    from attncheck.cases.validation import wanted

    if not isinstance(error.__cause__, ValidationError):
        return None
    details = error.__cause__.errors(include_url=False)[0]
    own = details.get("ctx", {}).get("error")
    return f"must be {wanted(details)} (found {details['input']!r})" if own is None else str(own).rstrip(".")
