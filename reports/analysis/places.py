"""The file and line of the user's code that a record is about, relative to the root of the checkout, as CI expects.

Computed from the text of the run file alone. A path outside the checkout is left out, since no CI service can show it.
"""

import re
from collections.abc import Iterator

from attncheck.reports.run_file.causes import died_at, place_of, raised_at
from attncheck.reports.run_file.header import RunHeader
from attncheck.reports.run_file.records import Ended, Errored, Failed, Record

_FILE_OF_REFERENCE = re.compile(r"(?:^|:)(?P<path>[^:]+\.py)(?::|$)")


def place_to_show(record: Record, header: RunHeader, root: str) -> tuple[str, int | None]:
    """Return file and line for an annotation, or ("", None) if no file of the record is below ``root``.

    The first choice is the line that raised or died, then the backend's file, then the YAML file of the suite.
    """
    suite = header.suite_ref(record.suite).partition("{")[0]
    places = [
        *_lines_of(record),
        (file_of(record.backend_ref), None),
        (suite if suite.endswith((".yaml", ".yml")) else "", None),
    ]
    for path, line in places:
        relative = _in_checkout(path, root)
        if relative:
            return relative, line
    return "", None


def backend_file(reference: str, root: str) -> str:
    """Return the file that a backend's reference names, relative to ``root``; "" if there is none below ``root``.

    >>> backend_file("./kernels/mine.py:Mine", "/work"), backend_file("vllm:/work/mine.py:Mine", "/work")
    ('kernels/mine.py', 'mine.py')
    >>> backend_file("/home/mine.py:Mine", "/work"), backend_file("torch_sdpa", "/work")
    ('', '')
    """
    return _in_checkout(file_of(reference), root)


def _lines_of(record: Record) -> Iterator[tuple[str, int | None]]:
    if isinstance(record, Errored):
        yield place_of(raised_at(record.traceback))
    if isinstance(record, Ended):
        yield from (place_of(place) for place in died_at(record.output))
    if isinstance(record, Failed):
        yield from (place_of(line.strip()) for detail in record.details for line in reversed(detail.splitlines()))


def file_of(reference: str) -> str:
    """Return the path of the Python file that a backend's reference names, or ""."""
    match = _FILE_OF_REFERENCE.search(reference)
    return match["path"] if match else ""


def _in_checkout(path: str, root: str) -> str:
    """Return a path relative to the root of the checkout, or "" if it is outside."""
    if path.startswith("/"):
        return path.removeprefix(f"{root}/") if root and path.startswith(f"{root}/") else ""
    return "" if path.startswith("../") else path.removeprefix("./")
