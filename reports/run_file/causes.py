"""The cause of a failure, as text by which records of one cause are grouped.

It is computed from text alone, since the run may be from another machine. The cause is the likely cause that a check
names, or the exception and its line, or what ended the process and where; otherwise the pattern of the summary. Figures
are replaced by ``N``, so that records which differ only in figures have one cause.

The line shown of a traceback is the author's own, not that of a library which raised. For a process that died, it is
the top of the stack that :mod:`faulthandler` writes, innermost call first. A line of a library or of the harness is
shown only if there is no other. One of torch, Triton, Python or the harness is never part of a cause: it is where a
fault of a GPU is noticed.
"""

import re
from collections.abc import Collection, Container, Iterator

SHOWN_FRAMES = 3
SHOWN_LINES = 4

UNEXPLAINED = "wrong rows, and no known fault explains them"

EVIDENCE = ": a reference with this fault gives the same {} in"
"""Separates a likely cause from the rows that support it, after the name of what was compared."""

SIZE = ": the error has the size of that with"
"""Separates the cause of an error of rounding from an arithmetic that is as coarse."""

_EVIDENCE = re.compile(rf"{EVIDENCE.format('(?:output|LSE)')}|{SIZE}|: its truth fits")
"""Both, and what run files of earlier versions have instead."""

_RESTRICTED = re.compile(r"wrong rows?, (?:all )?([^;]*)")
"""The end of the evidence if the cause fits some rows alone: what only these have in common."""

ALTERNATIVE = "; also possible: "
"""Separates a likely cause from others that fit as well."""

_ALTERNATIVE = re.compile(f"{ALTERNATIVE}|; it may also be that ")
"""The same, also in run files of earlier versions."""

BACKEND_TIME = "the time of the backend"
"""Words in the cause of every end by the time limit of a backend, its own or one that backends share."""

WITHIN_TIME = f"{BACKEND_TIME} by --within"
"""The same, of the time that backends share."""

NOT_REACHED = re.compile(rf"(?:the case did not run, because [\w ]+|stopped after \S+ s, since) {WITHIN_TIME}")
"""First words of the reason of a check that this time did not reach."""

UNKNOWN = "not known; "
"""First words of a meaning that describes the symptom and names no cause."""

ON_EARLIER = "faults that fit no earlier case were not tried again"
"""Last words of the meaning of a failure for which not all faults were tried."""

_SUMMARY_OF_ROWS = re.compile(r"\d+ of \d+ rows(?:, first: | (?:is|are) wrong, the first is )")
_IN_PARENTHESES = re.compile(r" \((?:row|request|head|page)[^()]*\)")
_DETAIL = re.compile(r", first: |, the first(?: is |: )|; worst | at row \d| reaches? \d+ of ")
_NUMBERS = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?(?:, -?\d+(?:\.\d+)?)*(?![\w])")
_PLACE = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+|\?\?\?),? in (?P<function>.+)')

_BYTES = re.compile(r" \((?:limit|the host had) [^()]*\)$")
_WAITS_FOR_DEVICE = re.compile(r'/torch/\w+/\w+\.py", line \d+ in synchronize$')
_RAISED = re.compile(r'File "(?P<path>[^"]+)", line \d+')
_INSTALLED = re.compile(r"/(?:site|dist)-packages/|/lib(?:64)?/python\d[\d.]*/|^<")
_ENGINE = re.compile(
    r"/(?:site|dist)-packages/(?:torch|triton)/|/lib(?:64)?/python\d[\d.]*/(?!(?:site|dist)-packages/)|^<"
)
_CALL_WAITED_FOR = re.compile(r'/harness/driver/foreign_code\.py", line \d+ in (?P<call>.+)$')
_HARNESS = re.compile(
    r"/attncheck/(?:harness/|backends/(?:candidates/vllm/|(?:registry|caches/(?:learned_codec|packings))\.py))"
)
_ATTNCHECK_INSTALLED = re.compile(r"/(?:site|dist)-packages/attncheck/")
_THREAD = re.compile(r"(?P<current>Current )?[Tt]hread 0x[0-9a-f]+.* \(most recent call first\):")
_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?:\d+|\?\?\?) in ')
_STACK_LINE = re.compile(
    r"<no Python frame>$|Extension modules: |Current thread's C stack trace|Binary file \"|\.\.\.$"
)


def cause_of_failure(check: str, summary: str, meaning: str | None) -> str:
    """Return the likely cause that the check named, else the pattern of its summary."""
    if causes := likely_causes(meaning):
        return without_figures(causes[0])
    if check == "numerics" and _SUMMARY_OF_ROWS.match(summary):
        return UNEXPLAINED
    return without_figures(symptom(summary))


def likely_causes(meaning: str | None) -> tuple[str, ...]:
    """Return the causes that a meaning names, the best first, or () if it names none."""
    if not meaning or meaning.startswith(UNKNOWN):
        return ()
    first, *others = _ALTERNATIVE.split(meaning)
    return (_EVIDENCE.split(first)[0], *others)


def is_fitted(meaning: str | None) -> bool:
    """Return whether the first cause of a meaning is a fault that was tried, and not what a check observed."""
    return _EVIDENCE.search(_ALTERNATIVE.split(meaning or "")[0]) is not None


def restriction(meaning: str) -> str:
    """Return what the only rows that a cause fits have in common, in words, or "" if it fits all rows."""
    found = _RESTRICTED.search(_ALTERNATIVE.split(meaning)[0])
    return found[1] if found else ""


def with_ranges(texts: Collection[str]) -> str:
    """Return texts that are equal up to their figures as one: ``the last 1 to 3 rows``.

    A figure that differs and is no whole number of its own, or is the end of a range, becomes ``N``.
    """
    found = [list(_NUMBERS.finditer(text)) for text in texts]
    first, *_ = texts
    words, at = "", 0
    for same in zip(*found, strict=True):
        match, figures = same[0], {each[0] for each in same}
        before, after = first[at : match.start()], first[match.end() :]
        figure = match[0] if len(figures) == 1 else "N"
        is_count = before[-1:] in ("", " ") and not before.endswith(" to ") and not after.startswith(" to ")
        if len(figures) > 1 and is_count and all(each.isdecimal() for each in figures):
            figure = f"{min(figures, key=int)} to {max(figures, key=int)}"
        words, at = f"{words}{before}{figure}", match.end()
    return words + first[at:]


def perhaps(cause: str) -> str:
    """Return a cause that only one case shows, as all reports print it."""
    return f"perhaps: {cause}"


def restricted(meaning: str, words: str, kept: Container[str]) -> str:
    """Return a meaning with the cause of these ``words`` first, and of the others those that ``kept`` contains.

    The evidence is left out if it may be that of another cause.
    """
    causes = likely_causes(meaning)
    first = next(cause for cause in causes if without_figures(cause) == words)
    others = [cause for cause in causes if cause != first and without_figures(cause) in kept]
    evidence = _ALTERNATIVE.split(meaning)[0].removeprefix(causes[0])
    # Causes that fit all rows compete only with such causes.
    is_own = first == causes[0] or evidence.endswith(" all rows")
    return ALTERNATIVE.join([f"{first}{evidence if is_own else ''}", *others])


def symptom(summary: str) -> str:
    """Return what a summary states as wrong, without the place."""
    return _DETAIL.split(_IN_PARENTHESES.sub("", summary).replace(" rows is wrong", " rows are wrong"))[0]


def cause_of_error(error_type: str, stage: str, message: str, traceback: str) -> str:
    """Return the exception and the author's line that raised it; without such a line, the stage and the message."""
    if line := cause_line(raised_at(traceback)):
        return f"{error_type} at {line}"
    first = next(iter(message.strip().splitlines()), "")
    return f"{error_type} in {stage}" + (f": {without_figures(first)}" if first else "")


def cause_of_end(cause: str, stage: str, output: str, after: str = "") -> str:
    """Return what ended the process and the author's line at that time.

    Without such a line, return which call's work on the GPU goes on, or the stage unless it is a check: a finding lists
    its checks. Figures after a semicolon, and those of memory, are left out. ``after``: the case without which it does
    not end.
    """
    if BACKEND_TIME in cause:
        return f"{BACKEND_TIME} was used up"
    cause = _BYTES.sub("", cause.partition(";")[0])
    place = next(iter(died_at(output)), "")
    if line := cause_line(place):
        words = f"{cause} at {line}"
    elif cause.startswith("not finished") and _WAITS_FOR_DEVICE.search(place):
        waiting = _CALL_WAITED_FOR.search("".join(died_at(output)[1:2]))
        words = f"{cause}: work of {waiting['call'] if waiting else 'the backend'} on the GPU goes on"
    else:
        words = cause if stage.startswith("check ") or not stage else f"{cause} during {stage}"
    return f"{words}, only after {after}" if after else words


def without_figures(text: str) -> str:
    """Return ``text`` with each number replaced by ``N``, and each list of numbers by one."""
    return _NUMBERS.sub("N", text)


def place_of(line: str) -> tuple[str, int | None]:
    """Return path and number of ``File "mine.py", line 12, in forward``, or ("", None) for any other text."""
    match = _PLACE.match(line)
    if match is None:
        return "", None
    return match["path"], int(match["line"]) if match["line"].isdigit() else None


def cause_line(place: str) -> str:
    """Return ``mine.py:12 in forward`` for a line of a stack, or "" for one of torch, Triton, Python or the harness."""
    match = _PLACE.match(place)
    if match is None or _HARNESS.search(match["path"]) or _ENGINE.search(match["path"]):
        return ""
    return f"{match['path'].rpartition('/')[2]}:{match['line']} in {match['function']}"


def raised_at(traceback: str) -> str:
    """Return the innermost ``File ..., line ..., in ...`` outside installed libraries and attncheck's harness.

    If there is none outside, return the innermost of all, or "" without a traceback. Backends that come with attncheck
    count as outside, even if attncheck is installed. Its bridge to vLLM counts as the harness.
    """
    places = [line.strip() for line in traceback.splitlines()]
    frames = [(match["path"], place) for place in places if (match := _RAISED.match(place))]
    own = [place for path, place in frames if not _is_foreign(path)]
    return (own or [place for _, place in frames] or [""])[-1]


def died_at(output: str) -> tuple[str, ...]:
    """Return at most three innermost frames, outside installed libraries and the harness, of the thread that died.

    Without such a frame, return the innermost ones of any file, or () without a stack. If no thread is marked as the
    one that died (it ran no Python), the stacks of all threads are used.
    """
    frames = list(_frames(output))
    own = [place for path, place in frames if not _is_foreign(path)]
    return tuple((own or [place for _, place in frames])[:SHOWN_FRAMES])


def native_frames(stack: str) -> tuple[str, ...]:
    """Return at most three innermost frames of the first thread in py-spy's output: ``sleep (libc.so.6)``."""
    thread, _, _ = stack.partition("\nThread ")
    return tuple(line.strip() for line in thread.splitlines()[1 : 1 + SHOWN_FRAMES] if line.startswith("    "))


def last_words(output: str) -> tuple[str, ...]:
    """Return at most four lines, the last ones printed that are not part of a stack."""
    lines = [line.strip() for line in output.splitlines()]
    words = [line for line in lines if line and not any(p.match(line) for p in (_THREAD, _FRAME, _STACK_LINE))]
    return tuple(words[-SHOWN_LINES:])


def _frames(output: str) -> Iterator[tuple[str, str]]:
    """Yield path and text of each frame of the last thread marked as current; if none is marked, of all threads."""
    lines = [line.strip() for line in output.splitlines()]
    headings = {index: match for index, line in enumerate(lines) if (match := _THREAD.fullmatch(line))}
    current = [index for index, match in headings.items() if match["current"]]
    first = current[-1] if current else 0
    end = next((index for index in headings if current and index > first), len(lines))
    for line in lines[first:end]:
        if match := _FRAME.match(line):
            yield match["path"], line


def _is_foreign(path: str) -> bool:
    """Return whether a file belongs to an installed library, to Python or to attncheck's harness."""
    if _HARNESS.search(path):
        return True
    return _INSTALLED.search(path) is not None and not _ATTNCHECK_INSTALLED.search(path)
