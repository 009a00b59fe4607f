"""Choose the device, the GPUs and the backends of a run."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from attncheck.backends import registry
from attncheck.backends.declarations import STATE_PATH
from attncheck.cases.model import Case, Suite
from attncheck.errors import BackendUnavailableError, DeviceError, QuestionError, SelectionError
from attncheck.harness.device import KINDS, accelerator_of, accepted_devices
from attncheck.harness.driver.observation import Raised
from attncheck.harness.run.outcomes import IMPORT, BackendDescription, not_loaded
from attncheck.reports.run_file.header import Environment

# Finds the GPUs of one kind, for processes that each use one of them. Loads no torch when imported.


@dataclass(frozen=True)
class Gpu:
    """A GPU for one process. ``variables``: environment variables that make it the only GPU visible to the process."""

    uuid: str
    variables: Mapping[str, str] = field(default_factory=dict)


def gpus_alike(device: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """Return the GPUs of the same model as GPU 0, and a note on each other GPU; none for ``cpu`` and ``cuda:N``."""
    accelerator = accelerator_of(device)
    if accelerator is None or accelerator.index is not None:
        return (), ()
    kind = type(accelerator)
    found = [kind(index).facts() for index in range(kind.module().device_count())]
    variables = gpu_variables(len(found), os.environ, kind.visible_variables())
    gpus = tuple(Gpu(each.uuid, alone) for each, alone in zip(found, variables, strict=False) if each == found[0])
    notes = tuple(
        f"GPU {index} ({each}) is not used: it is not of the kind of GPU 0 ({found[0]})"
        for index, each in enumerate(found)
        if each != found[0]
    )
    return gpus, notes


def gpu_variables(count: int, environment: Mapping[str, str], names: Sequence[str]) -> list[dict[str, str]]:
    """Return, for each of ``count`` GPUs visible under ``environment``, variables that make it the only visible one.

    ``names``: those of the kind of device, the one that decides first.
    """
    given = next((environment[name] for name in names if name in environment), None)
    entries = list(map(str, range(count))) if given is None else [each.strip() for each in given.split(",")]
    return [dict.fromkeys(names, entry) for entry in entries[:count]]


def refuse_other_gpu(device: str, uuid: str | None, environment: Environment) -> None:
    """Raise QuestionError unless GPU ``uuid`` is the only visible one and its environment equals ``environment``.

    ``uuid``: None accepts any GPU and any environment.
    """
    if uuid is None:
        return
    from attncheck.harness.run.evaluate import environment_of

    gpus, _ = gpus_alike(device)
    seen = [gpu.uuid for gpu in gpus]
    if seen != [uuid]:
        raise QuestionError(f"the process sees the GPUs {', '.join(seen)}, and has to use {uuid} alone")
    here, there = environment_of(device).model_dump(), environment.model_dump()
    for name, value in here.items():
        if value != there[name]:
            raise QuestionError(f"{name} on GPU {uuid} is {value!r}, and {there[name]!r} in the run")


# Selects the device of a run and the backends to examine on it. Loads no torch when imported.
#
# The command line, the pytest plugin and `attncheck.examine` all choose here, so that they report the same errors. The
# choice uses the descriptions of backends, which may be loaded in other processes. A backend that cannot run here is
# never dropped silently: it stays in the run with its reasons, or is refused with them if the user named it.


def choose_device(wanted: str | None) -> str:
    """Return ``wanted`` if this machine has it; if ``wanted`` is None, the best kind that is there.

    Raises:
        DeviceError: no such kind of device, or this machine or this torch does not have it.
    """
    import torch

    if wanted is None:
        return next((kind.type for kind in KINDS if not kind.absence()), "cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, ValueError) as error:
        raise DeviceError(wanted, f"no such device; give {accepted_devices()}") from error
    accelerator = accelerator_of(device)
    if accelerator is None:
        return "cpu"
    if absence := accelerator.absence():
        raise DeviceError(wanted, f"torch {torch.__version__} {absence}")
    count = accelerator.module().device_count()
    if (device.index or 0) >= count:
        raise DeviceError(wanted, f"this machine has {count} GPUs, counted from 0")
    return str(device)


def suite_device(wishes: Sequence[str], wanted: str | None) -> tuple[str, tuple[str, ...]]:
    """Return the device of the run and notes; if the user names none, the first of the suites' ``wishes`` is used.

    Raises:
        DeviceError: the device that the user named is not there. A suite's device that is not there only gives a note.
    """
    if wanted is not None or not wishes:
        return choose_device(wanted), ()
    try:
        return choose_device(wishes[0]), ()
    except DeviceError as error:
        best = choose_device(None)
        return best, (f"the suite names {error}: examined on {best} instead",)


def first_refs(refs: Sequence[str], suites: Sequence[Suite]) -> tuple[str, ...]:
    """Return ``refs``, or if empty the default backends of the suites, or if there are none the built-in backends."""
    wishes = [name for suite in suites for name in suite.default_backends]
    return tuple(dict.fromkeys(refs or wishes or registry.builtin_names()))


def choose_backends(
    refs: Sequence[str],
    suites: Sequence[Suite],
    cases: Sequence[Case],
    describe: Callable[[Sequence[str]], Sequence[BackendDescription | QuestionError]],
) -> tuple[tuple[BackendDescription, ...], tuple[str, ...]]:
    """Return the backends of a run, and notes on the choice.

    They are those of ``refs``. If ``refs`` is empty, they are the default backends of the suites; the built-in ones are
    added if none of these can run here. If the suites have none either, they are the built-in ones. Unless ``refs``
    names them, built-in backends are included only if ``cases`` have layers of the kind they serve (empty: any kind).

    A backend that cannot run here stays in the run, with its reasons. So does one that cannot be loaded, unless
    ``refs`` names it. A backend whose own code fails during loading stays too, and its cases get that outcome.
    ``describe``: returns descriptions of references, in order; an error if one names no backend to examine.

    Raises:
        QuestionError: one of ``refs`` is an unknown name or violates the contract; all of them raise while they are
            imported; two backends have the same name.
    """
    first = first_refs(refs, suites)
    found = describe(first)
    if refs:
        for each in found:
            if isinstance(each, QuestionError):
                raise each
        failures = [None if isinstance(each, QuestionError) else each.failure for each in found]
        raised = [each for each in failures if isinstance(each, Raised) and each.stage == IMPORT]
        if len(raised) == len(found):  # nothing is left to examine
            raise QuestionError("\n".join(failure.message for failure in raised))
    descriptions = list(map(_or_not_loaded, first, found))
    notes: list[str] = []
    has_wishes = not refs and any(suite.default_backends for suite in suites)
    if has_wishes and all(each.unavailable_reasons for each in descriptions):
        others = [name for name in registry.builtin_names() if name not in first]
        defaults, notes = _serving(list(map(_or_not_loaded, others, describe(others))), cases)
        notes.insert(0, "none of the backends that the suite names can run here: the built-in ones run as well")
        descriptions += defaults
    elif not refs and not has_wishes:
        descriptions, notes = _serving(descriptions, cases)
    names = [each.name for each in descriptions]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise SelectionError(f"two of the backends are called {name!r}; examine them in two runs")
    return tuple(descriptions), tuple(notes)


def refuse_unavailable(descriptions: Sequence[BackendDescription]) -> None:
    """Raise SelectionError for the first backend that cannot run here, with its reasons."""
    for each in descriptions:
        if each.unavailable_reasons:
            raise SelectionError(str(BackendUnavailableError(each.name, each.unavailable_reasons)))


def _serving(
    descriptions: Sequence[BackendDescription], cases: Sequence[Case]
) -> tuple[list[BackendDescription], list[str]]:
    """Return the backends that serve the kinds of layers in ``cases``, and notes on the others."""
    kinds = {_kind_of(case) for case in cases} or set(_KINDS)
    notes = []
    for kind, words in _KINDS.items():
        names = [each.name for each in descriptions if _served_by(each) == kind and kind not in kinds]
        if names:
            what = f"every case has {' or '.join(_KINDS[each] for each in _KINDS if each in kinds)}"
            what = what if kind == "attention" else f"no case has {words}"
            notes.append(f"not examined, since {what}: {', '.join(names)}")
    return [each for each in descriptions if _served_by(each) in kinds], notes


_Kind = Literal["latent", "state", "attention"]
_KINDS: Mapping[_Kind, str] = {"latent": "a latent cache", "state": "a state", "attention": "keys and values"}
"""The kinds of layers that a backend serves, with what such a layer has."""


def _kind_of(case: Case) -> _Kind:
    if case.batch.path.name == STATE_PATH:
        return "state"
    return "attention" if case.layer.mla is None else "latent"


def _served_by(backend: BackendDescription) -> _Kind:
    if backend.is_ssm:
        return "state"
    return "latent" if backend.is_mla else "attention"


def _or_not_loaded(ref: str, found: BackendDescription | QuestionError) -> BackendDescription:
    """Return ``found``, or the description of an unavailable backend if ``found`` is an error.

    The user did not name this backend, so its error does not end the run: a case file may list foreign backends.
    """
    return not_loaded(ref, (str(found),), name=ref) if isinstance(found, QuestionError) else found
