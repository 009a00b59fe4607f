"""Which line of a traceback to show: the author's own, not the library's that noticed.

From the text alone: the run may have been made on another machine. Must not know: records, torch, where anything is
installed here.
"""

import re

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line \d+')
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d[\d.]*/|^<")
_HARNESS = "/attncheck/harness/"
_ATTNCHECK_INSTALLED = re.compile(r"/(?:site|dist)-packages/attncheck/")


def raised_at(traceback: str) -> str:
    """The innermost ``File ..., line ..., in ...`` of neither an installed library nor attncheck's harness.

    The last one where all are of these; empty where there is none. Backends that come with attncheck are nobody's
    library, wherever it is installed.
    """
    places = [line.strip() for line in traceback.splitlines()]
    frames = [(match["path"], place) for place in places if (match := _FRAME.match(place))]
    own = [place for path, place in frames if not is_foreign(path)]
    return (own or [place for _, place in frames] or [""])[-1]


def is_foreign(path: str) -> bool:
    """Whether a file belongs to an installed library, to Python or to attncheck's harness."""
    if _HARNESS in path:
        return True
    return _INSTALLED.search(path) is not None and not _ATTNCHECK_INSTALLED.search(path)
