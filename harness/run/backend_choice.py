"""From names to candidates: the device of a run and the backends put on it.

The command line, the pytest plugin and ``attncheck.examine`` all choose here, so that they refuse the same things with
the same words, wherever backends are loaded: what is chosen among is what they say of themselves. Nothing is left out
silently: a backend that cannot run here stays in the run with its reasons, or, if it was asked for by name, is refused
with them. Importing this module loads no torch.
"""

from collections.abc import Sequence

from attncheck.backends import registry
from attncheck.cases.model import Case, Suite
from attncheck.errors import BackendUnavailableError, DeviceError, QuestionError, SelectionError
from attncheck.harness.run.backend_description import BackendDescription, DescribeBackends, LoadError, unloadable
from attncheck.harness.run.outcomes import IMPORT


def choose_device(wanted: str | None) -> str:
    """``wanted`` if it is there; without a wish the best: ``cuda`` where a GPU is, else ``cpu``.

    Raises:
        DeviceError: no such kind of device, or this machine or this torch does not have it.
    """
    import torch

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


def suite_device(wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """The run's device, and what to tell about it: the first of the suites' ``wishes`` counts where the user has none.

    Raises:
        DeviceError: the device the user asked for is not there. A suite's wish that cannot be met is only told.
    """
    if wanted is not None or not wishes:
        return choose_device(wanted), ()
    try:
        return choose_device(wishes[0]), ()
    except DeviceError as error:
        best = choose_device(None)
        return best, (f"the suite asks for {error}: examined on {best} instead",)


def first_refs(refs: Sequence[str], suites: Sequence[Suite]) -> tuple[str, ...]:
    """Whom a run asks in any case: those of ``refs``, else those the suites wish for, else the built-in ones."""
    wishes = [name for suite in suites for name in suite.default_backends]
    return tuple(dict.fromkeys(refs or wishes or registry.builtin_names()))


def choose_backends(
    refs: Sequence[str], suites: Sequence[Suite], cases: Sequence[Case], describe: DescribeBackends
) -> tuple[tuple[BackendDescription, ...], tuple[str, ...]]:
    """The backends of a run, and what to tell about the choice.

    Those of ``refs``. Without any, those the suites wish for, if one of them can run here; else the built-in ones
    too, where ``cases`` (none: any) have layers of the kind they serve. What cannot run here stays in the run, with its
    reasons; so does what ``refs`` does not name and cannot be loaded. A backend whose own code fails while it is loaded
    stays as well, and its cases have that outcome.

    Raises:
        QuestionError: one of ``refs`` is an unknown name or breaks the contract; all of them raise while they are
            imported; two backends have one name.
    """
    first = first_refs(refs, suites)
    found = describe(first)
    if refs:
        for each in found:
            if isinstance(each, QuestionError):
                raise each
        failures = [None if isinstance(each, QuestionError) else each.failure for each in found]
        raised = [each for each in failures if isinstance(each, LoadError) and each.stage == IMPORT]
        if len(raised) == len(found):  # and nothing is left to examine
            raise QuestionError("\n".join(failure.message for failure in raised))
    descriptions = list(map(_or_unloaded, first, found))
    notes: list[str] = []
    has_wishes = not refs and any(suite.default_backends for suite in suites)
    if has_wishes and all(each.unavailable_reasons for each in descriptions):
        others = [name for name in registry.builtin_names() if name not in first]
        defaults, notes = _serving(list(map(_or_unloaded, others, describe(others))), cases)
        notes.insert(0, "none of the backends the suite asks for can run here: the built-in ones run as well")
        descriptions += defaults
    elif not refs and not has_wishes:
        descriptions, notes = _serving(descriptions, cases)
    names = [each.name for each in descriptions]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise SelectionError(f"two of the backends are called {name!r}; examine them in two runs")
    return tuple(descriptions), tuple(notes)


def refuse_unavailable(descriptions: Sequence[BackendDescription]) -> None:
    """Raises SelectionError for the first backend that cannot run here, with its reasons."""
    for each in descriptions:
        if each.unavailable_reasons:
            raise SelectionError(str(BackendUnavailableError(each.name, each.unavailable_reasons)))


def _serving(
    descriptions: Sequence[BackendDescription], cases: Sequence[Case]
) -> tuple[list[BackendDescription], list[str]]:
    """The backends that serve the kind of layers ``cases`` have, and what to tell about the others."""
    kinds = {case.layer.mla is not None for case in cases} or {True, False}
    notes = []
    for is_mla in (True, False):
        names = [each.name for each in descriptions if each.is_mla == is_mla and is_mla not in kinds]
        if names:
            what = "no case has" if is_mla else "every case has"
            notes.append(f"not examined, since {what} a latent cache: {', '.join(names)}")
    return [each for each in descriptions if each.is_mla in kinds], notes


def _or_unloaded(ref: str, found: BackendDescription | QuestionError) -> BackendDescription:
    """What nobody asked for by name is no wrong question: a foreign file may name what attncheck has no adapter for."""
    return unloadable(ref, ref, (str(found),)) if isinstance(found, QuestionError) else found
