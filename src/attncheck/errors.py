"""The one error tree of attncheck. Every room may import this module; it imports nothing of ours.

::

    AttncheckError
    |-- QuestionError                the question was wrong: exit code 2
    |   |-- CaseFileError            reading a YAML file: file, line, column, key, value, what would be right
    |   |   `-- SeveralMistakesError     several mistakes of one file
    |   |-- BatchSpecError           reading a batch string: text, position, why
    |   |-- SpecError                a layer, cache or batch that means nothing (also a ValueError)
    |   |   `-- NotExpressibleError      a case that no stand-alone file can hold
    |   |-- UnknownNameError         a backend, suite, check, ... nobody knows; carries the known names
    |   |-- SelectionError           no case or backend is left after the filters
    |   |-- BackendLoadError         a named backend could not be imported, or breaks the contract
    |   |-- ProviderLoadError        a named provider of utilities could not be imported
    |   |-- DeviceError              a device that is not there
    |   |-- ClusterError             a Ray cluster that is not there, or has no node for the run
    |   |-- BlindCaseError           a case whose truth does not notice what it asks about
    |   |-- RunFileError             a run file that cannot be trusted: path, line, why
    |   `-- MissingExtraError        something asked for needs a package that is not installed
    |-- WriteError                   a full disk, a read-only folder, a closed stdout: exit code 3
    |-- BackendUnavailableError      a registered backend cannot run on this machine: an outcome, not a fault
    |-- ExaminationFailedError       an examination did not pass, and the caller demands it (also an AssertionError)
    |-- DeviceLostError              a backend lost the device: the process cannot use it any more
    |-- ReferenceArgumentError       the reference refuses an undefined argument (also a ValueError)
    `-- InternalError                from one part of attncheck to another, each defined in its own module
        |-- StageError               a backend raised: carries what, and in which stage of the contract
        |-- CodecError               a cache codec cannot be trusted
        |-- _UnknownLayoutError      what a cache writer did is no layout that can be learned
        |-- FormError                an answer is no tensor of the right shape, dtype and device
        |-- CaptureError             a forward cannot be captured as a CUDA graph
        |-- UnseenError              the recorder of graphs cannot see what a forward does
        |-- ReleasedMemoryError      a replayed graph wrote to memory that is no longer its own
        |-- UntrustworthyTimeError   a time cannot be trusted: ends the measurement
        |-- UnfitQuestionError       a question to a provider that the reference answers otherwise than it should
        |-- ProcessEndedError        a backend's process ended while an answer was due
        |-- PipeClosedError          the pipe between the run and a backend's process is closed
        |-- WorkerError              attncheck itself failed in a backend's process
        `-- FellShortError           a record that fell short, on its way to pytest's report

Errors are fields; ``str()`` renders them, and nothing else in attncheck composes these sentences. An internal error, or
anything outside this tree, that reaches the command line is a fault of attncheck itself: exit code 3.
"""

import errno
from collections.abc import Sequence
from difflib import get_close_matches

SHOWN_ERRORS = 10
"""Mistakes of one file that are shown at once."""

_MACHINE_FAULTS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),  # the disk is full or broken
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # the folder is read-only
    errno.EPIPE,  # nothing reads the pipe any more
)
LONGEST_MESSAGE = 2000
"""Characters of one mistake; files from strangers have longer names and values."""


class AttncheckError(Exception):
    """Root of everything attncheck raises on purpose."""


class QuestionError(AttncheckError):
    """The question was wrong (exit code 2): the user can mend it, no backend is to blame."""


class CaseFileError(QuestionError):
    """A case file (or an expectation file) says something that cannot be.

    ``line`` and ``column`` count from 1; ``key`` is the dotted path of the value, ``allowed`` what would be right.
    """

    def __init__(
        self,
        reason: str,
        *,
        file: str,
        line: int | None = None,
        column: int | None = None,
        key: str = "",
        value: object = None,
        allowed: str = "",
    ) -> None:
        self.reason, self.file, self.line, self.column = reason, file, line, column
        self.key, self.value, self.allowed = key, value, allowed
        super().__init__(reason)

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.file, self.line, self.column) if part is not None)
        text = f"{place}: {self.key}: {self.reason}" if self.key else f"{place}: {self.reason}"
        if self.value is not None:
            text += f" (found {shorten(self.value)})"
        return readable(f"{text}; {self.allowed}" if self.allowed else text)


class SeveralMistakesError(CaseFileError):
    """Several mistakes of one file, in the order of its lines; its own fields are those of the first."""

    def __init__(self, errors: Sequence[CaseFileError]) -> None:
        """``errors``: at least one; those that are several themselves are taken apart, repetitions left out."""
        by_place: dict[tuple[int | None, int | None, str], CaseFileError] = {}
        for error in errors:
            for each in error.errors if isinstance(error, SeveralMistakesError) else (error,):
                by_place.setdefault((each.line, each.column, each.key), each)
        self.errors: tuple[CaseFileError, ...] = tuple(
            sorted(by_place.values(), key=lambda each: (each.line or 0, each.column or 0))
        )
        first = self.errors[0]
        super().__init__(
            first.reason,
            file=first.file,
            line=first.line,
            column=first.column,
            key=first.key,
            value=first.value,
            allowed=first.allowed,
        )

    def __str__(self) -> str:
        shown = [str(each) for each in self.errors[:SHOWN_ERRORS]]
        more = len(self.errors) - SHOWN_ERRORS
        return "\n".join([*shown, f"{self.file}: and {more} more mistakes"] if more > 0 else shown)


class BatchSpecError(QuestionError):
    """A batch string that does not parse or means nothing; ``position`` counts characters from 0."""

    def __init__(self, reason: str, *, text: str, position: int = 0, allowed: str = "") -> None:
        self.reason, self.text, self.position, self.allowed = reason, text, position, allowed
        super().__init__(reason)

    def __str__(self) -> str:
        message = f"batch {shorten(self.text)}: {self.reason} (at character {self.position + 1})"
        return f"{message}; {self.allowed}" if self.allowed else message


class SpecError(QuestionError, ValueError):
    """A field of a layer, cache or batch has a value that means nothing; ``field`` is its name."""

    def __init__(self, reason: str, *, field: str, value: object, allowed: str) -> None:
        self.reason, self.field, self.value, self.allowed = reason, field, value, allowed
        super().__init__(reason)

    def __str__(self) -> str:
        return f"{self.field} = {shorten(self.value)}: {self.reason}; {self.allowed}"


class UnknownNameError(QuestionError):
    """A name nobody knows; ``kind`` is what was looked for (backend, suite, check, ...)."""

    def __init__(self, kind: str, name: str, known: Sequence[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        super().__init__(name)

    def __str__(self) -> str:
        close = get_close_matches(self.name, self.known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown {self.kind} {self.name!r}{hint} (known: {', '.join(self.known) or 'none'})"


class SelectionError(QuestionError):
    """The filters leave nothing to examine, or a backend asked for by name cannot be examined here."""


class BackendLoadError(QuestionError):
    """A backend named on the command line could not be loaded, or breaks the contract.

    ``raised``: the type of the exception that the backend's own code raised meanwhile; empty: it raised none.
    """

    def __init__(self, ref: str, reason: str, *, allowed: str = "", raised: str = "") -> None:
        self.ref, self.reason, self.allowed, self.raised = ref, reason, allowed, raised
        super().__init__(reason)

    def __str__(self) -> str:
        message = f"backend {self.ref!r}: {self.reason}"
        return f"{message}; {self.allowed}" if self.allowed else message


class ProviderLoadError(QuestionError):
    """A provider named on the command line could not be imported."""

    def __init__(self, ref: str, reason: str) -> None:
        self.ref, self.reason = ref, reason
        super().__init__(reason)

    def __str__(self) -> str:
        return f"provider {self.ref!r}: {self.reason}"


class DeviceError(QuestionError):
    """A device that this machine, or this torch, does not have."""

    def __init__(self, device: str, reason: str) -> None:
        self.device, self.reason = device, reason
        super().__init__(reason)

    def __str__(self) -> str:
        return f"device {self.device!r}: {self.reason}"


class ClusterError(QuestionError):
    """A Ray cluster that cannot be reached, has no room, or has lost or refused every node."""

    def __init__(self, address: str, reason: str) -> None:
        self.address, self.reason = address, reason
        super().__init__(reason)

    def __str__(self) -> str:
        return f"Ray cluster {self.address!r}: {self.reason}"


class BlindCaseError(QuestionError):
    """A case cannot see what it asks about: its truth hardly moves when ``subject`` is changed."""

    def __init__(self, case: str, subject: str, reason: str) -> None:
        self.case, self.subject, self.reason = case, subject, reason
        super().__init__(reason)

    def __str__(self) -> str:
        return f"case {self.case}: blind to {self.subject}: {self.reason}"


class RunFileError(QuestionError):
    """A run file that cannot be read, or contradicts itself; ``line`` counts from 1."""

    def __init__(self, path: str, reason: str, *, line: int | None = None) -> None:
        self.path, self.reason, self.line = path, reason, line
        super().__init__(reason)

    def __str__(self) -> str:
        return readable(f"{self.path}{'' if self.line is None else f':{self.line}'}: {self.reason}")


class WriteError(AttncheckError):
    """A file, or stdout, cannot be written, and the question is not to blame; ``safe``: what of it can be read."""

    def __init__(self, name: str, cause: OSError, *, safe: str = "") -> None:
        self.name, self.cause, self.safe = name, cause, safe
        super().__init__(name)

    def __str__(self) -> str:
        message = f"{self.name} cannot be written: {self.cause.strerror or self.cause}"
        return f"{message}; {self.safe}" if self.safe else message


def unwritable(name: str, error: OSError) -> WriteError | QuestionError:
    """Return the error of what ``name`` names: WriteError where the machine is to blame for ``error``."""
    if error.errno in _MACHINE_FAULTS:
        return WriteError(name, error)
    return QuestionError(f"{name} cannot be written: {error.strerror}")


class MissingExtraError(QuestionError):
    """Something asked for (``what``) needs ``package``, which is not installed; ``extra`` of attncheck brings it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.what, self.package, self.extra = what, package, extra
        super().__init__(what)

    def __str__(self) -> str:
        return f"{self.what} needs {self.package}, which is not installed; pip install 'attncheck[{self.extra}]'"


class BackendUnavailableError(AttncheckError):
    """A registered backend cannot be imported or run on this machine; ``reasons`` say why."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.name, self.reasons = name, tuple(reasons)
        super().__init__(name)

    def __str__(self) -> str:
        return f"backend {self.name!r} is unavailable here: {'; '.join(self.reasons)}"


class ExaminationFailedError(AttncheckError, AssertionError):
    """An examination did not pass; the message holds its findings. A test framework counts it as a failure."""


class ReferenceArgumentError(AttncheckError, ValueError):
    """The reference refuses an argument whose meaning is undefined."""

    def __init__(self, argument: str, value: object, required: str) -> None:
        self.argument, self.value, self.required = argument, value, required
        super().__init__(argument)

    def __str__(self) -> str:
        return f"{self.argument} = {shorten(self.value)}: must be {self.required}"


class InternalError(AttncheckError):
    """Carries an outcome from one part of attncheck to another, which catches it."""


def shorten(value: object, limit: int = 80) -> str:
    """``repr(value)`` cut to ``limit`` characters, so that a message stays one line."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def readable(text: str) -> str:
    """Return ``text`` on one line, with escapes for what is not printable, and without its middle where it is long."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    half = LONGEST_MESSAGE // 2
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} ... {text[-half:]}"
