"""From names to candidates: the device of a run and the backends put on it.

The command line, the pytest plugin and ``attncheck.examine`` all choose here, so that they refuse the same things with
the same words. Nothing is left out silently: a backend that cannot run here stays in the run with its reasons, or, if
it was asked for by name, is refused with them. Must not know: how anything is examined or shown.
"""

from collections.abc import Sequence

import torch

from attncheck.backends import registry
from attncheck.backends.registry import LoadedBackend
from attncheck.cases.model import Case, Suite
from attncheck.errors import BackendUnavailableError, DeviceError, QuestionError, SelectionError
from attncheck.harness.engine import Missing
from attncheck.harness.stages import StageError, declared_reasons


def choose_device(wanted: str | None) -> str:
    """``wanted`` if it is there; without a wish the best: ``cuda`` where a GPU is, else ``cpu``.

    Raises:
        DeviceError: no such kind of device, or this machine or this torch does not have it.
    """
    if wanted is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(wanted)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(wanted, "no such device; give cpu, cuda or cuda:N") from error
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise DeviceError(wanted, "attncheck examines on cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.backends.cuda.is_built() else "is built without CUDA"
        raise DeviceError(wanted, f"torch {torch.__version__} {built}; `attncheck doctor` says more")
    if (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(wanted, f"this machine has {torch.cuda.device_count()} GPUs, counted from 0")
    return str(device)


def suite_device(suites: Sequence[Suite], wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """The run's device, and what to tell about it: a wish of a suite counts where the user has none.

    Raises:
        DeviceError: the device the user asked for is not there. A suite's wish that cannot be met is only told.
    """
    wishes = [suite.default_device for suite in suites if suite.default_device]
    if wanted is not None or not wishes:
        return choose_device(wanted), ()
    try:
        return choose_device(wishes[0]), ()
    except DeviceError as error:
        best = choose_device(None)
        return best, (f"the suite asks for {error}: examined on {best} instead",)


def load_backends(refs: Sequence[str]) -> tuple[LoadedBackend | Missing, ...]:
    """The backends asked for by name; a built-in one that cannot be loaded here is :class:`Missing`, with its reasons.

    Raises:
        QuestionError: a name nobody knows, a file that does not import, a contract broken, two of one name.
    """
    found: list[LoadedBackend | Missing] = []
    for ref in dict.fromkeys(refs):
        try:
            backend: LoadedBackend | Missing = registry.load(ref)
        except BackendUnavailableError as error:
            backend = Missing(error.name, ref, error.reasons)
        if any(other.name == backend.name for other in found):
            raise SelectionError(f"two of the backends are called {backend.name!r}; examine them in two runs")
        found.append(backend)
    return tuple(found)


def refuse_unavailable(backends: Sequence[LoadedBackend | Missing], device: str) -> None:
    """Raises SelectionError for the first backend that cannot run here on ``device``, with its reasons."""
    for backend in backends:
        reasons = backend.reasons if isinstance(backend, Missing) else unavailable_reasons(backend, device)
        if reasons:
            raise SelectionError(str(BackendUnavailableError(backend.name, reasons)))


def unavailable_reasons(backend: LoadedBackend, device: str) -> tuple[str, ...]:
    """Why the backend cannot run here; empty where it says it can, or where asking it raises.

    A declaration that raises is an outcome of the examination (``errored``), and not for this place to judge.
    """
    try:
        return declared_reasons(lambda: backend.backend.unavailable_reasons(device))
    except StageError:
        return ()


def choose_backends(
    refs: Sequence[str], suites: Sequence[Suite], device: str, cases: Sequence[Case] = ()
) -> tuple[tuple[LoadedBackend | Missing, ...], tuple[str, ...]]:
    """The backends of a run, and what to tell about the choice.

    Those of ``refs``. Without any, those the suites wish for, if one of them can run here; else the built-in ones
    too, where ``cases`` (default: any) has layers of the kind they serve. What cannot run here stays in the run, with
    its reasons.

    Raises:
        QuestionError: as :func:`load_backends` does.
    """
    if refs:
        return load_backends(refs), ()
    wished = [
        _load_or_miss(name) for name in dict.fromkeys(name for suite in suites for name in suite.default_backends)
    ]
    if any(isinstance(backend, LoadedBackend) and not unavailable_reasons(backend, device) for backend in wished):
        return tuple(wished), ()
    defaults, left_out = _serving(load_backends(registry.builtin_names()), cases)
    notes = ("none of the backends the suite asks for can run here: the built-in ones run as well",) if wished else ()
    return (*wished, *defaults), (*notes, *left_out)


def _serving(
    backends: Sequence[LoadedBackend | Missing], cases: Sequence[Case]
) -> tuple[list[LoadedBackend | Missing], list[str]]:
    """The backends that serve the kind of layers ``cases`` have, and what to tell about the others."""
    kinds = {case.layer.mla is not None for case in cases} or {True, False}
    kept: list[LoadedBackend | Missing] = []
    others: dict[bool, list[str]] = {True: [], False: []}
    for backend in backends:
        is_mla = isinstance(backend, LoadedBackend) and backend.backend.is_mla()
        if is_mla in kinds:
            kept.append(backend)
        else:
            others[is_mla].append(backend.name)
    notes = []
    for is_mla, names in others.items():
        if names:
            what = "no case has" if is_mla else "every case has"
            notes.append(f"not examined, since {what} a latent cache: {', '.join(names)}")
    return kept, notes


def _load_or_miss(name: str) -> LoadedBackend | Missing:
    """A wish of a suite: a foreign file may name what attncheck has no adapter for, and is no wrong question."""
    try:
        (backend,) = load_backends([name])
    except QuestionError as error:
        return Missing(name, name, (str(error),))
    return backend
