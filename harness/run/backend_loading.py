"""Backends loaded into this process: from a name to the class, and to what it says of itself."""

import os
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict

from attncheck.backends import registry
from attncheck.backends.declarations import MultipleOf
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.errors import BackendLoadError, BackendUnavailableError, QuestionError
from attncheck.harness.checks.case_checks import import_checks
from attncheck.harness.driver.foreign_code import StageError, call_backend, declared_reasons, settings_kept
from attncheck.harness.driver.observation import printable
from attncheck.harness.run.backend_description import BackendDescription, missing_variables, unloadable
from attncheck.harness.run.plan import UnavailableBackend
from attncheck.harness.run.selection import DEFAULT_SUITES
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import BackendInfo


def load_backend(
    ref: str, checks: Collection[str] = BACKEND_CHECKS, *, functions: bool = True
) -> LoadedBackend | UnavailableBackend:
    """The backend ``ref`` names; one that cannot be loaded here is :class:`UnavailableBackend`, with its reasons.

    What its module does to process-wide settings is undone. ``checks``, ``functions``: of what is made of it later, the
    modules are imported first (:func:`import_checks`).

    Raises:
        QuestionError: a name nobody knows, a file that does not import, a contract broken.
    """
    import_checks(checks, functions=functions)
    try:
        with settings_kept():
            return registry.load(ref)
    except BackendUnavailableError as error:
        return UnavailableBackend(error.name, ref, error.reasons)


def describe_backend(backend: LoadedBackend | UnavailableBackend, device: str) -> BackendDescription:
    """What ``backend`` says of itself, to be run on ``device``.

    Raises:
        BackendLoadError: what it says of its environment is no mapping of names to texts, whether it is of latent
            attention (``is_mla``) is no bool, or its default suite is none of those.
    """
    if isinstance(backend, UnavailableBackend):
        return unloadable(backend.name, backend.ref, backend.reasons, backend.version)
    declared = backend.backend
    page_sizes, page_multiples, layouts = _pages_of(backend)
    info = BackendInfo(
        name=backend.name,
        ref=backend.ref,
        version=backend.version,
        conventions=asdict(declared.conventions),
        features=tuple(sorted(declared.features)),
        required_environment=required_environment(backend, device),
    )
    return BackendDescription(
        info=info,
        is_mla=is_mla(backend),
        default_suite=default_suite(backend, device),
        page_sizes=page_sizes,
        page_multiples=page_multiples,
        layouts=layouts,
        unavailable_reasons=unavailable_reasons(backend, device),
    )


def _pages_of(backend: LoadedBackend) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Return page sizes, sizes of which each multiple is taken, and layouts; none where the declarations are broken."""
    try:
        declared = call_backend("declaration", lambda: list(backend.backend.get_supported_kernel_block_sizes()))
        layouts = call_backend("declaration", lambda: tuple(map(str, backend.backend.supported_layouts)))
    except StageError:
        return (), (), ()
    sizes = tuple(size for size in declared if isinstance(size, int))
    return sizes, tuple(size.base for size in declared if isinstance(size, MultipleOf)), layouts


def unavailable_reasons(backend: LoadedBackend, device: str) -> tuple[str, ...]:
    """Why the backend cannot run here; empty where it says it can, or where asking it raises.

    A declaration that raises is an outcome of the examination (``errored``), and not for this place to judge.
    """
    try:
        return declared_reasons(lambda: backend.backend.unavailable_reasons(device))
    except StageError:
        return ()


def reasons_against(
    backend: LoadedBackend | UnavailableBackend, device: str, cases: Iterable[Case]
) -> tuple[tuple[str, ...], ...]:
    """Return why the backend does not answer each case on ``device``; empty: it does, or a declaration raises."""
    return tuple(_reasons_against(backend, device, case) for case in cases)


def _reasons_against(backend: LoadedBackend | UnavailableBackend, device: str, case: Case) -> tuple[str, ...]:
    if isinstance(backend, UnavailableBackend):
        return backend.reasons
    cls, asked = backend.backend, (case.layer, case.cache, case.batch)
    try:
        absent = declared_reasons(lambda: cls.unavailable_case_reasons(device, *asked))
        return absent or declared_reasons(lambda: cls.unsupported_reasons(*asked))
    except StageError:
        return ()


def is_mla(backend: LoadedBackend) -> bool:
    """Whether the backend is one of latent attention.

    Raises:
        BackendLoadError: asking it raises, or the answer is something else.
    """
    try:
        answer: object = call_backend("is_mla", backend.backend.is_mla)
    except StageError as failure:
        raise BackendLoadError(backend.ref, failure.raised.in_words) from failure
    if not isinstance(answer, bool):
        raise BackendLoadError(backend.ref, f"is_mla answered {answer!r}, neither True nor False")
    return answer


def default_suite(backend: LoadedBackend, device: str) -> str:
    """The suite the backend is asked where the user names none.

    Raises:
        BackendLoadError: asking it raises, or the answer is something else.
    """
    try:
        answer: object = call_backend("default_suite", lambda: backend.backend.default_suite(device))
    except StageError as failure:
        raise BackendLoadError(backend.ref, failure.raised.in_words) from failure
    if not isinstance(answer, str) or answer not in DEFAULT_SUITES:
        raise BackendLoadError(backend.ref, f"default_suite answered {answer!r}, none of {', '.join(DEFAULT_SUITES)}")
    return answer


def required_environment(backend: LoadedBackend, device: str) -> dict[str, str]:
    """The variables the backend's process must be started with.

    Raises:
        BackendLoadError: asking it raises, or the answer is something else.
    """
    try:
        required: object = call_backend("required_environment", lambda: backend.backend.required_environment(device))
    except StageError as failure:
        raise BackendLoadError(backend.ref, failure.raised.in_words) from failure
    if not isinstance(required, dict) or not all(map(_is_variable, required.items())):
        raise BackendLoadError(backend.ref, f"required_environment answered {required!r}, no dict of names to texts")
    return required


def _is_variable(pair: tuple[object, object]) -> bool:
    """Whether name and value can stand in an environment."""
    name, value = pair
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return name != "" and "=" not in name and "\0" not in name + value and printable(name + value) == name + value


def usable_here(backend: LoadedBackend | UnavailableBackend, device: str) -> LoadedBackend | UnavailableBackend:
    """The backend, if this process was started with what it requires; else a missing one, and what to type."""
    if isinstance(backend, UnavailableBackend):
        return backend
    needs = missing_variables(required_environment(backend, device), os.environ)
    if not needs:
        return backend
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in needs.items())
    reason = f"this process must have been started with {words}: type it before the command"
    return UnavailableBackend(backend.name, backend.ref, (reason,), backend.version)


class Loader:
    """Loads backends into this process, where they are examined."""

    def __init__(self, device: str, loaded: Sequence[LoadedBackend | UnavailableBackend] = ()) -> None:
        """``loaded``: backends that are not to be loaded again."""
        self._device = device
        self._loaded = {each.ref: each for each in loaded}
        self._found: dict[str, LoadedBackend | UnavailableBackend] = {}

    def describe(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        """What each of ``refs`` names, or why it names nothing."""
        return [self._description(ref) for ref in refs]

    def backends(self, descriptions: Sequence[BackendDescription]) -> tuple[LoadedBackend | UnavailableBackend, ...]:
        """The backends that were described so."""
        return tuple(
            self._found.get(each.ref) or UnavailableBackend(each.name, each.ref, each.unavailable_reasons)
            for each in descriptions
        )

    def _description(self, ref: str) -> BackendDescription | QuestionError:
        try:
            loaded = self._loaded.get(ref) or load_backend(ref)
            found = self._found[ref] = usable_here(loaded, self._device)
            description = describe_backend(loaded, self._device)
        except QuestionError as error:
            return error
        if isinstance(found, UnavailableBackend):
            # The description holds, although the backend cannot be examined in this process.
            return description.model_copy(update={"is_loaded": False, "unavailable_reasons": found.reasons})
        return description
