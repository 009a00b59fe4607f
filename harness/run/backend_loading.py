"""Loads backends into this process: resolves a name to a class, and reads the declarations of the class."""

import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from sysconfig import get_path
from types import ModuleType
from typing import TYPE_CHECKING

import attncheck
from attncheck.backends import registry
from attncheck.backends.claims import claim_of, declared_claims
from attncheck.backends.declarations import MultipleOf
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case
from attncheck.errors import BackendLoadError, BackendUnavailableError, QuestionError
from attncheck.harness.checks.case_checks import import_checks
from attncheck.harness.driver.foreign_code import (
    StageError,
    call_backend,
    declared_reasons,
    settings_kept,
    unavailable_case_reasons,
    unsupported_reasons,
)
from attncheck.harness.driver.observation import Raised, printable
from attncheck.harness.run.evaluate import Examiner, environment_of
from attncheck.harness.run.outcomes import IMPORT, Backend, BackendDescription, missing_variables, not_loaded
from attncheck.harness.run.preparation import suite_device
from attncheck.harness.run.run import digest_of
from attncheck.harness.run.selection import DEFAULT_SUITES, RunPlan, Selection
from attncheck.reference.spec import BACKEND_CHECKS
from attncheck.reports.run_file.header import BackendInfo, DeclaredClaim, Environment

if TYPE_CHECKING:
    from attncheck.harness.checks.timing.check import TimingCheck
    from attncheck.harness.run.run import Run

_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of folders of installed packages."""


def load_backend(ref: str, checks: Collection[str] = BACKEND_CHECKS, *, functions: bool = True) -> Backend:
    """Return the backend that ``ref`` names, or its description with the reasons if it cannot be loaded here.

    Changes that its module makes to process-wide settings are undone. ``checks``, ``functions``: the modules that these
    checks and functions need are imported before the backend (:func:`import_checks`).

    Raises:
        QuestionError: the name is unknown, the file does not import, or the class violates the contract.
    """
    import_checks(checks, functions=functions)
    try:
        with settings_kept():
            return registry.load(ref)
    except BackendUnavailableError as error:
        return not_loaded(ref, error.reasons, error.name)


def describe_backend(backend: Backend, device: str) -> BackendDescription:
    """Return the description of ``backend`` for a run on ``device``.

    Raises:
        BackendLoadError: ``required_environment``, ``is_mla``, ``is_ssm`` or ``default_suite`` raises, or returns no
            dict of valid names and values, no bool, or none of :data:`DEFAULT_SUITES`.
    """
    if isinstance(backend, BackendDescription):
        return backend
    declared = backend.backend
    is_mla = _declared_bool(backend, "is_mla", declared.is_mla)
    is_ssm = _declared_bool(backend, "is_ssm", declared.is_ssm)
    suite = _declared(backend, "default_suite", lambda: declared.default_suite(device))
    if not isinstance(suite, str) or suite not in DEFAULT_SUITES:
        raise _fault(backend, f"default_suite answered {suite!r}, none of {', '.join(DEFAULT_SUITES)}")
    page_sizes, page_multiples, layouts = _pages_of(backend)
    info = BackendInfo(
        name=backend.name,
        ref=backend.ref,
        version=backend.version,
        conventions=asdict(declared.conventions),
        features=tuple(sorted(declared.features)),
        claims=claims_in_header(declared_claims(getattr(declared, "their_backend", declared), declared.features)),
        required_environment=required_environment(backend, device),
        files={} if backend.ref in registry.BUILTIN else loaded_files(),  # a built-in one has attncheck's own
    )
    return BackendDescription(
        info=info,
        is_mla=is_mla,
        is_ssm=is_ssm,
        default_suite=suite,
        page_sizes=page_sizes,
        page_multiples=page_multiples,
        layouts=layouts,
        unavailable_reasons=unavailable_reasons(backend, device),
    )


def claims_in_header(values: Mapping[str, str]) -> tuple[DeclaredClaim, ...]:
    """Return the claims of a class, given by member and value, with what measures each."""
    claims = ((asdict(claim_of(member)), value) for member, value in values.items())
    kept = DeclaredClaim.model_fields
    return tuple(
        DeclaredClaim(value=value, **{name: each for name, each in claim.items() if name in kept})
        for claim, value in claims
    )


def loaded_files() -> dict[str, str]:
    """Return the digests of the files whose code this process has loaded, and of compiled libraries beside them.

    Files of installed packages, Python and attncheck are left out, as are those that a backend imports later, and those
    that cannot be read. A file is named by its path below the folder of ``sys.path`` that it was found in, so that the
    names are equal elsewhere. Files of the same name share one digest.
    """
    own = (str(Path(attncheck.__file__).parent), get_path("stdlib"), get_path("platstdlib"))
    files = set()
    modules: Mapping[str, object] = dict(sys.modules)
    for name, module in modules.items():
        place = vars(module).get("__file__") if isinstance(module, ModuleType) else None  # a lazy one imports more
        if name == "__main__" or not isinstance(place, str) or place.startswith(own):
            continue
        file = Path(place)
        if _INSTALLED.isdisjoint(file.parts) and file.is_file():
            files.add(file.resolve())
    for folder in {file.parent for file in files}:
        files.update(folder.glob("*.so"))
    found: dict[str, list[str]] = {}
    for file in files:
        with suppress(OSError):
            found.setdefault(_name_on_path(file), []).append(digest_of(file))
    return {name: _joined(digests) for name, digests in sorted(found.items())}


def _joined(digests: Sequence[str]) -> str:
    """Return the one digest, or that of all of them."""
    return digests[0] if len(digests) == 1 else sha256("".join(sorted(digests)).encode()).hexdigest()[:12]


def _name_on_path(file: Path) -> str:
    roots = [root for root in (Path(each).resolve() for each in sys.path) if file.is_relative_to(root)]
    return file.relative_to(max(roots, key=lambda root: len(root.parts), default=file.parent)).as_posix()


def _pages_of(backend: LoadedBackend) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...]]:
    """Return page sizes, bases whose multiples are accepted, and layouts; all empty if a declaration raises."""
    try:
        declared = call_backend("declaration", lambda: list(backend.backend.get_supported_kernel_block_sizes()))
        layouts = call_backend("declaration", lambda: tuple(map(str, backend.backend.supported_layouts)))
    except StageError:
        return (), (), ()
    sizes = tuple(size for size in declared if isinstance(size, int))
    return sizes, tuple(size.base for size in declared if isinstance(size, MultipleOf)), layouts


def unavailable_reasons(backend: LoadedBackend, device: str) -> tuple[str, ...]:
    """Return why the backend cannot run here; empty if it can, or if its declaration raises.

    A declaration that raises is reported by the examination, as ``errored``.
    """
    try:
        return declared_reasons(lambda: backend.backend.unavailable_reasons(device))
    except StageError:
        return ()


def reasons_against(backend: Backend, device: str, cases: Iterable[Case]) -> tuple[tuple[str, ...], ...]:
    """Return, for each case, why the backend refuses it on ``device``; empty if it accepts or a declaration raises."""
    if isinstance(backend, BackendDescription):
        return tuple(backend.unavailable_reasons for _ in cases)
    found = []
    for case in cases:
        try:
            absent = unavailable_case_reasons(backend.backend, case, device)
            found.append(absent or unsupported_reasons(backend.backend, case))
        except StageError:
            found.append(())
    return tuple(found)


def required_environment(backend: LoadedBackend, device: str) -> dict[str, str]:
    """Return the environment variables with which the backend's process must be started.

    Raises:
        BackendLoadError: its ``required_environment`` raises, or returns no dict of valid names and values.
    """
    required = _declared(backend, "required_environment", lambda: backend.backend.required_environment(device))
    if not isinstance(required, dict) or not all(map(_is_variable, required.items())):
        raise _fault(backend, f"required_environment answered {required!r}, no dict of names to texts")
    return required


def _declared(backend: LoadedBackend, name: str, call: Callable[[], object]) -> object:
    try:
        return call_backend(name, call)
    except StageError as failure:
        raise _fault(backend, failure.raised.in_words, failure.raised.error_type) from failure


def _declared_bool(backend: LoadedBackend, name: str, call: Callable[[], object]) -> bool:
    value = _declared(backend, name, call)
    if not isinstance(value, bool):
        raise _fault(backend, f"{name} answered {value!r}, neither True nor False")
    return value


def _fault(backend: LoadedBackend, reason: str, raised: str = BackendLoadError.__name__) -> BackendLoadError:
    return BackendLoadError(backend.ref, reason, raised=raised)


def _is_variable(pair: tuple[object, object]) -> bool:
    """Return whether name and value are valid for an environment variable."""
    name, value = pair
    if not isinstance(name, str) or not isinstance(value, str):
        return False
    return name != "" and "=" not in name and "\0" not in name + value and printable(name + value) == name + value


def _described_here(backend: Backend, device: str) -> BackendDescription:
    """Return the description of ``backend``, as not loaded if this process lacks the environment that it requires.

    The reason then has the variables to set before the command.
    """
    description = describe_backend(backend, device)
    needs = missing_variables(description.info.required_environment, os.environ)
    if not needs:
        return description
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in needs.items())
    reason = f"this process must have been started with {words}: type it before the command"
    return description.model_copy(update={"is_loaded": False, "unavailable_reasons": (reason,)})


class ThisProcess:
    """Loads the backends of a run into this process, and examines them here."""

    fits_pages = True

    def __init__(self, loaded: Sequence[Backend] = ()) -> None:
        """``loaded``: backends that are loaded already."""
        self._device = "cpu"
        self._loaded = {each.ref: each for each in loaded}

    def choose_device(self, wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...], Environment]:
        """Return the device of the run, notes on the choice, and the environment on it.

        Raises:
            DeviceError: the device that the user named is not there.
        """
        self._device, notes = suite_device(wishes, wanted)
        return self._device, notes, environment_of(self._device)

    def begin(self, selection: Selection, plan: RunPlan, environment: Environment) -> None:
        """Do nothing: this process has the run."""

    def describe(self, refs: Sequence[str]) -> list[BackendDescription | QuestionError]:
        """Return the description of each of ``refs``, or the error that loading it raised."""
        return [self._description(ref) for ref in refs]

    def examiner(self, run: "Run", costs: object = None, clocks: "TimingCheck | None" = None) -> Examiner:
        """Return what examines the questions of ``run``, one after another. ``clocks``: as for :class:`Examiner`."""
        backends = tuple(self._loaded[each.ref] if each.is_loaded else each for each in run.backends)
        return Examiner(replace(run.plan, backends=backends), run.environment, clocks)

    def close(self, *, at_once: bool = False) -> None:
        """Do nothing: there is no other process."""

    def _description(self, ref: str) -> BackendDescription | QuestionError:
        try:
            if ref not in self._loaded:
                self._loaded[ref] = load_backend(ref)
            return _described_here(self._loaded[ref], self._device)
        except BackendLoadError as error:
            return not_loaded(ref, Raised(IMPORT, error.raised, str(error))) if error.raised else error
        except QuestionError as error:
            return error
