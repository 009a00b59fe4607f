"""The exception classes of attncheck. Every package may import this module; it imports nothing of attncheck.

::

    AttncheckError
    |-- QuestionError                invalid input of the user: exit code 2
    |   |-- CaseFileError            a mistake in a YAML file: file, line, column, key, value, what is allowed
    |   |   `-- SeveralMistakesError     several mistakes in one file
    |   |-- BatchSpecError           an invalid batch string: text, position, reason
    |   |-- SpecError                an invalid field of a layer, cache or batch (also a ValueError)
    |   |   `-- NotExpressibleError      a case that no stand-alone file can hold
    |   |-- UnknownNameError         an unknown backend, suite, check, ...; lists the known names
    |   |-- SelectionError           no case or backend is left after the filters
    |   |-- BackendLoadError         a named backend cannot be imported, or breaks the contract
    |   |-- ProviderLoadError        a named provider of utilities cannot be imported
    |   |-- DeviceError              the machine, or torch, does not have the device
    |   |-- ClusterError             no Ray cluster at the address, or no node for the run
    |   |-- BlindCaseError           the expected result of a case hardly depends on what the case tests
    |   |-- RefusedError             a backend's process refused a call: no such device or backend, a changed suite
    |   |-- RunFileError             an unreadable or inconsistent run file: path, line, reason
    |   `-- MissingExtraError        a requested feature needs a package that is not installed
    |-- WriteError                   a full disk, a read-only folder, a closed stdout: exit code 3
    |-- BackendUnavailableError      a registered backend cannot run on this machine: an outcome, not a fault
    |-- ExaminationFailedError       an examination did not pass, and the caller requires it (also an AssertionError)
    |-- DeviceLostError              a backend lost the device: the process can no longer use it
    |-- ReferenceArgumentError       the reference rejects an undefined argument (also a ValueError)
    `-- InternalError                passed between parts of attncheck; each class is defined in its own module
        |-- StageError               a backend raised: the exception, and the stage of the contract
        |-- CodecError               a cache codec cannot be trusted
        |-- _UnknownLayoutError      the writes of a cache writer fit no layout that can be inferred
        |-- FindingError             ends a check with its finding
        |-- StoppedError             the run was stopped, so that it starts no process
        |-- CaptureError             a forward cannot be captured as a CUDA graph
        |-- UnseenError              the graph recorder cannot see what a forward does
        |   `-- BranchError          a forward read the device, and may take another branch on a GPU
        |-- ReleasedMemoryError      a replayed graph wrote to memory that was released
        |-- UnfitQuestionError       the reference accepts arguments that it should reject, or the reverse
        |-- ProcessEndedError        a backend's process ended before it answered
        |-- PipeClosedError          the pipe between the run and a backend's process is closed
        |-- WorkerError              attncheck itself failed in a backend's process
        `-- FellShortError           a record that did not pass, passed on to pytest's report

An error holds fields, and ``str()`` renders them as the message. An internal error, or any exception outside this tree,
that reaches the command line is a fault of attncheck itself: exit code 3.
"""

import errno
from collections.abc import Sequence
from difflib import get_close_matches

SHOWN_ERRORS = 10
"""Most mistakes of one file that a message shows."""

_MACHINE_FAULTS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO),  # the disk is full or broken
    *(errno.EROFS, errno.EACCES, errno.EPERM),  # the folder is read-only
    errno.EPIPE,  # nothing reads the pipe any more
)
LONGEST_MESSAGE = 2000
"""Most characters of one message. Names and values in files can be longer."""


class AttncheckError(Exception):
    """Base class of all exceptions that attncheck raises on purpose."""


class QuestionError(AttncheckError):
    """Invalid input that the user can correct (exit code 2); no backend is at fault."""


class CaseFileError(QuestionError):
    """A case file or an expectation file has an invalid value.

    ``line`` and ``column`` count from 1. ``key`` is the dotted path of the value. ``allowed`` states what is valid.
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
    """Several mistakes in one file, in line order; its own fields are those of the first mistake."""

    def __init__(self, errors: Sequence[CaseFileError]) -> None:
        """Take at least one error. Nested SeveralMistakesErrors are flattened, and duplicates are dropped."""
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
    """A batch string that does not parse or is invalid; ``position`` counts characters from 0."""

    def __init__(self, reason: str, *, text: str, position: int = 0, allowed: str = "") -> None:
        self.reason, self.text, self.position, self.allowed = reason, text, position, allowed
        super().__init__(reason)

    def __str__(self) -> str:
        message = f"batch {shorten(self.text)}: {self.reason} (at character {self.position + 1})"
        return f"{message}; {self.allowed}" if self.allowed else message


class SpecError(QuestionError, ValueError):
    """A field of a layer, cache or batch has an invalid value; ``field`` is its name."""

    def __init__(self, reason: str, *, field: str, value: object, allowed: str) -> None:
        self.reason, self.field, self.value, self.allowed = reason, field, value, allowed
        super().__init__(reason)

    def __str__(self) -> str:
        return f"{self.field} = {shorten(self.value)}: {self.reason}; {self.allowed}"


class UnknownNameError(QuestionError):
    """An unknown name; ``kind`` is what was looked up (backend, suite, check, ...)."""

    def __init__(self, kind: str, name: str, known: Sequence[str]) -> None:
        self.kind, self.name, self.known = kind, name, tuple(known)
        super().__init__(name)

    def __str__(self) -> str:
        close = get_close_matches(self.name, self.known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown {self.kind} {self.name!r}{hint} (known: {', '.join(self.known) or 'none'})"


class SelectionError(QuestionError):
    """The filters select no case, or a backend named by the user cannot be examined on this machine."""


class BackendLoadError(QuestionError):
    """A backend named on the command line cannot be loaded, or breaks the contract.

    ``raised``: if the backend's own code is at fault, the type of the exception that it raised during loading, or the
    name of this class. Such a backend costs a run its own cases only. Empty if the name is at fault.
    """

    def __init__(self, ref: str, reason: str, *, allowed: str = "", raised: str = "") -> None:
        self.ref, self.reason, self.allowed, self.raised = ref, reason, allowed, raised
        super().__init__(reason)

    def __str__(self) -> str:
        message = f"backend {self.ref!r}: {self.reason}"
        return f"{message}; {self.allowed}" if self.allowed else message


class ProviderLoadError(QuestionError):
    """A provider named on the command line cannot be imported."""

    def __init__(self, ref: str, reason: str) -> None:
        self.ref, self.reason = ref, reason
        super().__init__(f"provider {ref!r}: {reason}")


class DeviceError(QuestionError):
    """This machine, or the installed torch, does not have the device."""

    def __init__(self, device: str, reason: str) -> None:
        self.device, self.reason = device, reason
        super().__init__(f"device {device!r}: {reason}")


class ClusterError(QuestionError):
    """A Ray cluster that is unreachable, is full, or has lost or refused every node."""

    def __init__(self, address: str, reason: str) -> None:
        self.address, self.reason = address, reason
        super().__init__(f"Ray cluster {address!r}: {reason}")


class BlindCaseError(QuestionError):
    """The expected result of a case hardly changes when ``subject`` changes, so the case cannot test it."""

    def __init__(self, case: str, subject: str, reason: str) -> None:
        self.case, self.subject, self.reason = case, subject, reason
        super().__init__(f"case {case}: blind to {subject}: {reason}")


class RunFileError(QuestionError):
    """A run file that is unreadable or inconsistent; ``line`` counts from 1."""

    def __init__(self, path: str, reason: str, *, line: int | None = None) -> None:
        self.path, self.reason, self.line = path, reason, line
        super().__init__(reason)

    def __str__(self) -> str:
        return readable(f"{self.path}{'' if self.line is None else f':{self.line}'}: {self.reason}")


class WriteError(AttncheckError):
    """A file or stdout cannot be written because of the machine; ``safe`` states what can still be read of it."""

    def __init__(self, name: str, cause: OSError, *, safe: str = "") -> None:
        self.name, self.cause, self.safe = name, cause, safe
        super().__init__(name)

    def __str__(self) -> str:
        message = f"{self.name} cannot be written: {self.cause.strerror or self.cause}"
        return f"{message}; {self.safe}" if self.safe else message


def unwritable(name: str, error: OSError) -> WriteError | QuestionError:
    """Return the error for an unwritable ``name``: WriteError if the machine is at fault, else QuestionError."""
    if error.errno in _MACHINE_FAULTS:
        return WriteError(name, error)
    return QuestionError(f"{name} cannot be written: {error.strerror}")


class MissingExtraError(QuestionError):
    """The requested feature ``what`` needs ``package``, which is not installed; attncheck's ``extra`` installs it."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.what, self.package, self.extra = what, package, extra
        super().__init__(f"{what} needs {package}, which is not installed; pip install 'attncheck[{extra}]'")


class BackendUnavailableError(AttncheckError):
    """A registered backend cannot be imported or run on this machine, for the given ``reasons``."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.name, self.reasons = name, tuple(reasons)
        super().__init__(f"backend {name!r} is unavailable here: {'; '.join(self.reasons)}")


class ExaminationFailedError(AttncheckError, AssertionError):
    """An examination did not pass; the message holds its findings. Test frameworks count it as a failure."""


class ReferenceArgumentError(AttncheckError, ValueError):
    """The reference rejects an argument whose meaning is undefined."""

    def __init__(self, argument: str, value: object, required: str) -> None:
        self.argument, self.value, self.required = argument, value, required
        super().__init__(argument)

    def __str__(self) -> str:
        return f"{self.argument} = {shorten(self.value)}: must be {self.required}"


class InternalError(AttncheckError):
    """Base class of exceptions that one part of attncheck raises and another catches."""


def shorten(value: object, limit: int = 80) -> str:
    """Return ``repr(value)`` cut to ``limit`` characters, so that a message stays on one line."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def readable(text: str) -> str:
    """Return ``text`` on one line: unprintable characters escaped, the middle left out beyond LONGEST_MESSAGE."""
    if not text.isprintable():
        text = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    half = LONGEST_MESSAGE // 2
    return text if len(text) <= LONGEST_MESSAGE else f"{text[:half]} ... {text[-half:]}"
