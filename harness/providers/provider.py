"""A provider of metadata utilities: its functions, the questions for them, and their answers."""

import importlib.util
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType, NoneType, SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import attncheck.reference
from attncheck.backends import registry
from attncheck.backends.mutants.catalogue import PREFIX
from attncheck.backends.mutants.loading import mutant_utilities
from attncheck.errors import BackendLoadError, ProviderLoadError, shorten
from attncheck.harness.providers.aliases import FREE, SHARED, Alias, aliases_of
from attncheck.harness.providers.batches import ProviderBatch
from attncheck.reports.run_file.header import BackendInfo

# The answer of a function as plain values: its result or refusal, and its arguments after the call.
#
# Two answers are compared field by field, so that a difference has a place (`returned.seq_lens[3]`) and both values. A
# reported maximum above the truth is an upper bound, which vLLM allows everywhere; one below is wrong. Any exception
# counts as a refusal; its type is left to the implementation.

UPPER_BOUNDS = frozenset({"max_query_len", "max_seq_len"})
"""Fields whose value may exceed the truth."""

REFUSAL = "refusal"
"""The place of a difference where only one side refuses."""

ABSENT = "nothing of that name"
"""The value reported for a missing attribute."""


@dataclass(frozen=True)
class Refusal:
    """The function raised. ``error``: the name of the exception's class."""

    error: str
    message: str

    def __str__(self) -> str:
        first = next(iter(self.message.strip().splitlines()), "")
        return f"a refusal ({self.error}" + (f": {_cut(first)})" if first else ")")


@dataclass(frozen=True, eq=False)
class Values:
    """A snapshot of a tensor or array: its dtype, the type of its device, and a copy on the host."""

    dtype: str
    values: Tensor
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.dtype} {shorten(self.values.tolist())}"

    def first_difference(self, other: "Values") -> tuple[int, ...] | None:
        """Return the index of the first element that differs, or None if all are equal. The shapes must be equal."""
        unequal = (self.values != other.values).nonzero()
        return tuple(unequal[0].tolist()) if len(unequal) else None


class NumpyInt(int):
    """A value that was a NumPy integer; it equals a Python integer but has another type."""


@dataclass(frozen=True)
class ProviderAnswer:
    """``returned``: the result in plain values, or a :class:`Refusal`. ``arguments``: their values after the call.

    ``aliases``: what the result shares, by place. ``result``: the result itself.
    """

    returned: Any
    arguments: Any
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    result: Any = None

    @property
    def refused(self) -> bool:
        """Whether the function raised."""
        return isinstance(self.returned, Refusal)


@dataclass(frozen=True)
class AnswerDifference:
    """One place where two answers differ. ``tolerated``: reported but not wrong, such as an upper bound."""

    place: str
    expected: str
    seen: str
    tolerated: bool = False

    def __str__(self) -> str:
        return f"{self.place}: expected {self.expected}; got {self.seen}"


def answer_of(call: Callable[..., Any], arguments: Mapping[str, Any], earlier: Any = None) -> ProviderAnswer:
    """Call ``call`` with these keywords; any exception except KeyboardInterrupt becomes a refusal.

    ``earlier``: the result of an earlier call, whose memory the result may not have.
    """
    returned: Any
    try:
        result = call(**arguments)
        returned, aliases = plain_value(result), aliases_of(result, arguments, earlier)
    except (Exception, SystemExit) as error:  # noqa: BLE001 (foreign code)
        returned, aliases, result = Refusal(type(error).__name__, str(error)), {}, None
    return ProviderAnswer(returned, plain_value(dict(arguments)), aliases, result)


def plain_value(value: Any) -> Any:
    """Return a snapshot of ``value`` in numbers, strings, lists, dicts and :class:`Values`; it shares no memory."""
    match value:
        case None | str():
            return value
        case Enum():
            return str(value)
        case bool() | np.bool_():
            return bool(value)
        case np.integer():
            return NumpyInt(value)
        case int():
            return int(value)
        case float() | np.floating():
            return float(value)
        case Tensor():
            name = str(value.dtype).removeprefix("torch.")
            return Values(name, value.detach().cpu().clone(), value.device.type)
        case np.ndarray():
            return Values(str(value.dtype), torch.from_numpy(value.copy()))
        case slice():
            return {name: plain_value(getattr(value, name)) for name in ("start", "stop", "step")}
        case range() | torch.device() | torch.dtype():
            return str(value)
        case list() | tuple():
            return [plain_value(item) for item in value]
        case Mapping():
            return {key: plain_value(item) for key, item in value.items()}
        case type():
            return value.__name__
        case SimpleNamespace():
            return {name: plain_value(item) for name, item in vars(value).items()}
    if is_dataclass(value):
        return {field.name: plain_value(getattr(value, field.name, ABSENT)) for field in fields(value)}
    return f"a {type(value).__name__}"


def answer_differences(expected: ProviderAnswer, seen: ProviderAnswer) -> list[AnswerDifference]:
    """Return the differences of ``seen`` from ``expected``. If both refuse, only the arguments are compared."""
    if expected.refused and seen.refused:
        found: list[AnswerDifference] = []
    elif expected.refused or seen.refused:
        found = [AnswerDifference(REFUSAL, _format(expected.returned), _format(seen.returned))]
    else:
        found = list(_differences("returned", expected.returned, seen.returned)) or list(_shared(expected, seen))
    return found + list(_differences("arguments", expected.arguments, seen.arguments))


def _differences(place: str, expected: Any, seen: Any) -> Iterator[AnswerDifference]:
    match expected, seen:
        case Values(), Values():
            yield from _in_values(place, expected, seen)
        case dict(), dict():
            for key, value in expected.items():
                yield from _differences(f"{place}.{key}", value, seen.get(key, ABSENT))
        case int(), NumpyInt() if type(expected) is int and expected == seen:
            yield AnswerDifference(f"{place}.type", "int", "an integer of numpy's", tolerated=True)
        case list(), list() if len(expected) == len(seen):
            for index, (ours, theirs) in enumerate(zip(expected, seen, strict=True)):
                yield from _differences(f"{place}[{index}]", ours, theirs)
        case _:
            if type(expected) is not type(seen) or expected != seen:
                bound = is_bound(place) and isinstance(expected, int) and isinstance(seen, int) and seen > expected
                yield AnswerDifference(place, _format(expected), _format(seen), tolerated=bound)


MEMORY = "memory"
"""Last part of the place of a difference in what a result shares."""


def _shared(expected: ProviderAnswer, seen: ProviderAnswer) -> Iterator[AnswerDifference]:
    """Yield what results of equal values share, or do not share, other than the reference's."""
    for place, alias in seen.aliases.items():
        if place not in expected.aliases and place.rpartition(".")[2] not in FREE:
            yield AnswerDifference(f"{place}.{MEMORY}", "new", f"that of {alias.owner}")
    for place, alias in expected.aliases.items():
        name = place.rpartition(".")[2]
        is_required = name in SHARED or (alias.is_same and name not in FREE)
        if place not in seen.aliases and is_required:
            yield AnswerDifference(f"{place}.{MEMORY}", f"that of {alias.owner}", "new")


def is_bound(place: str) -> bool:
    """Return whether the value at ``place`` may exceed the truth."""
    return place.rpartition(".")[2] in UPPER_BOUNDS


def _in_values(place: str, expected: Values, seen: Values) -> Iterator[AnswerDifference]:
    if expected.values.shape != seen.values.shape:
        yield AnswerDifference(place, _with_shape(expected), _with_shape(seen))
        return
    if expected.dtype != seen.dtype:
        yield AnswerDifference(f"{place}.dtype", expected.dtype, seen.dtype)
    if expected.device != seen.device:
        yield AnswerDifference(f"{place}.device", expected.device, seen.device)
    index = expected.first_difference(seen)
    if index is not None:
        where = "".join(f"[{axis}]" for axis in index)
        ours = expected.values[index].item()
        theirs = seen.values[index].item()
        yield AnswerDifference(f"{place}{where}", f"{ours} of {expected}", f"{theirs} of {seen}")


def _cut(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _with_shape(values: Values) -> str:
    return f"{values} of shape {list(values.values.shape)}"


def _format(value: Any) -> str:
    """Return a value on one line, cut if it is long."""
    match value:
        case Refusal() | Values():
            return str(value)
        case dict():
            return _cut(", ".join(f"{key}={_format(item)}" for key, item in value.items()))
        case list():
            return _cut(f"[{', '.join(map(_format, value))}]")
        case str():
            return value
        case slice():
            return f"{value.start}:{value.stop}"
        case _:
            return shorten(value)


# Compare the parameters of two functions: each must exist by name, in its position, with its default.

PARAMETERS = "parameters"
"""Prefix of the places of these differences."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a function or class by name, or None if Python cannot determine them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def signature_differences(
    ours: Callable[..., Any], theirs: Callable[..., Any], newer: frozenset[str] = frozenset()
) -> list[AnswerDifference]:
    """Return parameters of ``ours`` that ``theirs`` lacks or has with another position or default, and additional ones.

    An additional optional parameter is tolerated, and so is the absence of a ``newer`` one. Empty for a function that
    takes ``*args`` or ``**kwargs``, or whose signature Python cannot determine; it is judged by its answers alone.
    """
    known, seen = parameters_of(ours), parameters_of(theirs)
    if known is None or seen is None:
        return []
    if any(parameter.kind not in _NAMED for parameter in seen.values()):
        return []
    expected = {name: parameter for name, parameter in known.items() if name in seen or name not in newer}
    return [*_changed(expected, seen), *_further(known, seen)]


def _changed(known: Any, seen: Any) -> list[AnswerDifference]:
    found = []
    for place, (name, parameter) in enumerate(known.items()):
        expected = _format_parameter(place, parameter)
        other = _format_parameter(list(seen).index(name), seen[name]) if name in seen else ABSENT
        if expected != other:
            found.append(AnswerDifference(f"{PARAMETERS}.{name}", expected, other))
    return found


def _further(known: Any, seen: Any) -> list[AnswerDifference]:
    return [
        AnswerDifference(
            f"{PARAMETERS}.{name}",
            ABSENT,
            _format_parameter(place, parameter),
            tolerated=parameter.default is not inspect.Parameter.empty,
        )
        for place, (name, parameter) in enumerate(seen.items())
        if name not in known
    ]


def _format_parameter(place: int, parameter: inspect.Parameter) -> str:
    only = ", by keyword only" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
    if parameter.default is inspect.Parameter.empty:
        return f"parameter {place + 1}, required{only}"
    return f"parameter {place + 1}, default {parameter.default!r}{only}"


# Subjects and their questions: a subject is one public name, a question is one call of it.

Generation = Literal["v1", "v0"]


@dataclass(frozen=True)
class SubjectCall:
    """One call, with keyword arguments in the reference's objects.

    ``tags``: special properties of the call, which departures refer to. ``refused``: whether the reference must refuse
    it.
    """

    text: str
    arguments: Mapping[str, Any]
    tags: frozenset[str] = frozenset()
    refused: bool = False

    def copies(self) -> dict[str, Any]:
        """Return deep copies of the arguments for one call, since a provider may write into them."""
        return deepcopy(dict(self.arguments))


@dataclass(frozen=True)
class SubjectSetting:
    """The batches of the run, and the device of their tensors."""

    batches: Sequence[ProviderBatch]
    device: torch.device


def call_directly(target: Callable[..., Any], **arguments: Any) -> Any:
    """Return ``target(**arguments)``, the default ``call`` of a :class:`Subject`."""
    return target(**arguments)


@dataclass(frozen=True)
class Subject:
    """One public name of the reference, and how it is examined.

    ``call(target, *helpers, **arguments)`` calls the object of that name and returns the value to compare.
    ``helpers``: further names of the same module that it needs. ``is_function``: whether its parameters are compared,
    too. ``newer``: parameters that older versions lack; questions that use them are skipped for such versions.
    ``ours``: the reference's object that has these parameters, if the public one lacks them.
    """

    name: str
    questions: Callable[[SubjectSetting], Iterable[SubjectCall]]
    call: Callable[..., Any] = call_directly
    generation: Generation = "v1"
    helpers: tuple[str, ...] = ()
    is_function: bool = True
    newer: frozenset[str] = frozenset()
    ours: Callable[..., Any] | None = None

    @property
    def key(self) -> str:
        """The name, prefixed by its generation if that is v0, since several names have another meaning there."""
        return self.name if self.generation == "v1" else f"{self.generation}.{self.name}"


def are_apart(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share no storage, so that writing into one does not change the other."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def subject_call(about: object, *tags: str, refused: bool = False, **arguments: Any) -> SubjectCall:
    """Return a question with these keywords; its text is ``about``, then each argument that is short to write."""
    short = [f"{name} {_format(value)}" for name, value in arguments.items() if isinstance(value, _SHORT)]
    return SubjectCall(": ".join([str(about), *filter(None, [", ".join(short)])]), arguments, frozenset(tags), refused)


_SHORT = (int, str, slice, NoneType)
"""Types of arguments that the text of a question contains."""


# Known differences between a provider and the reference, each with its reason and exactly what it changes.
#
# A *drift* is a change of signature or meaning since the version that the reference describes. A *judgement* is a
# defect, or an input accepted without a check, for which the reference deliberately has another answer. A departure
# turns the reference's object into one with this difference alone; only the answers of that object are excused.
# Departures are verified: one that does not show wherever it is predicted is stale.


@dataclass(frozen=True)
class Departure:
    """One known difference; ``what`` describes what the provider does.

    ``changes(object)``: returns the reference's object with this difference, for questions with ``tag``, or for all of
    them if it is empty. ``parameters``: pairs of a differing parameter and what the provider has instead.
    ``shows(object)``: whether the provider's object has a difference of form, which an adapter hides from the answers.
    """

    kind: Literal["drift", "judgement"]
    what: str
    changes: Callable[[Any], Any] | None = None
    tag: str = ""
    parameters: tuple[tuple[str, str], ...] = ()
    shows: Callable[[Any], bool] | None = None

    def concerns(self, question: SubjectCall) -> bool:
        """Return whether this departure may change the answer to this question."""
        return self.changes is not None and (not self.tag or self.tag in question.tags)

    def explains_parameter(self, difference: AnswerDifference) -> bool:
        """Return whether this departure is the cause of a difference between parameters."""
        return (difference.place, difference.seen) in self.parameters


@dataclass(frozen=True)
class Departures:
    """The departures of one provider by subject, made from ``version``; empty if none are known.

    ``gone``: pairs of a shell pattern and a reason, for names of the reference that the provider no longer has.
    """

    version: str = ""
    known: Mapping[str, tuple[Departure, ...]] = field(default_factory=dict)
    gone: tuple[tuple[str, str], ...] = ()

    def why_gone(self, subject: str) -> str | None:
        """Return the reason why the provider lacks a name, or None if the table has none."""
        return next((why for pattern, why in self.gone if fnmatchcase(subject, pattern)), None)


# Find the known departures that turn the reference's answer into the observed one: exactly these, or none.
#
# If departures change the right answer, two kinds of answers are excused: that of the reference with all departures,
# and with some of them, since a newer version may have fixed one. An upper bound is not wrong, unless a departure
# predicts its exact value.

Chosen = tuple[Departure, ...]


@dataclass(frozen=True)
class Explanation:
    """``shown``: the departures that showed. ``missed``: those predicted that did not show.

    ``kinds``: kinds of the departures that showed and change an answer in more than a tolerated way. ``tolerated`` and
    ``wrong``: the remaining differences.
    """

    shown: Chosen = ()
    missed: Chosen = ()
    kinds: frozenset[str] = frozenset()
    tolerated: tuple[AnswerDifference, ...] = ()
    wrong: tuple[AnswerDifference, ...] = ()


def explain_answer(
    expected: ProviderAnswer, seen: ProviderAnswer, known: Chosen, predict: Callable[[Chosen], ProviderAnswer]
) -> Explanation:
    """Return the departures that explain ``seen``, and the differences that none explains.

    expected: the reference's answer. known: the departures that concern the question. predict: returns the reference's
    answer with some of them applied.
    """
    everything = predict(known) if known else expected
    bearing = tuple(each for each in known if answer_differences(predict(_without(known, each)), everything))
    contested = {difference.place for difference in answer_differences(expected, everything)}
    closest: Explanation | None = None
    for chosen in _subsets(bearing):
        answer = predict(chosen) if chosen else expected
        found = answer_differences(answer, seen)
        tolerated = tuple(each for each in found if each.tolerated and each.place not in contested)
        wrong = tuple(each for each in found if each not in tolerated)
        missed = tuple(each for each in bearing if each not in chosen)
        if not wrong:
            kinds = frozenset(each.kind for each in chosen if _matters(predict(_without(chosen, each)), answer))
            return Explanation(chosen, missed, kinds, tolerated)
        if closest is None or len(wrong) <= len(closest.wrong):
            closest = Explanation(chosen, missed, frozenset(), tolerated, wrong)
    assert closest is not None  # the empty subset is always tried
    return closest


def _without(chosen: Chosen, departure: Departure) -> Chosen:
    return tuple(each for each in chosen if each is not departure)


def _subsets(bearing: Chosen) -> Iterable[Chosen]:
    """Return all subsets, the largest first; the empty one, which is the reference's own answer, comes last."""
    return (chosen for size in range(len(bearing), -1, -1) for chosen in combinations(bearing, size))


def _matters(without: ProviderAnswer, answer: ProviderAnswer) -> bool:
    return not all(difference.tolerated for difference in answer_differences(without, answer))


# Resolve a name to a provider, and find what it offers.
#
# A name denotes `vllm`, a file of its functions, a module, a file or a mutant. A plain module offers objects under the
# reference's names, and those of the first generation under `v0`; it takes and returns the reference's own objects. A
# package that needs more (objects of its own, several modules, known departures) is described in this package.

Adapter = Callable[[Any], Any]
"""Makes a provider's object accept and return the reference's objects."""


@dataclass(frozen=True)
class Provider:
    """One or several modules that offer metadata utilities.

    ``modules`` are searched in order; for the first generation, those of ``v0`` are. ``adapters``: by subject key.
    ``adapt``: for all other subjects, or None.
    """

    name: str
    ref: str
    version: str
    modules: Sequence[ModuleType]
    v0: Sequence[ModuleType] = ()
    adapt: Adapter | None = None
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    departures: Departures = field(default_factory=Departures)

    @property
    def info(self) -> BackendInfo:
        """The provider in the header of a run file, where it is listed with the backends."""
        return BackendInfo(name=self.name, ref=self.ref, version=self.version)

    def find(self, name: str, generation: Generation = "v1") -> Any:
        """Return the object called ``name``, or None.

        For the first generation, ``modules`` are searched after ``v0``, unless both generations have the name.
        """
        modules = [*self.modules] if generation == "v1" else [*self.v0]
        if generation == "v0" and not hasattr(attncheck.reference, name):
            modules += self.modules
        return next((getattr(module, name) for module in modules if hasattr(module, name)), None)

    def adapted(self, key: str, target: Any) -> Any:
        """Return ``target``, the object of subject ``key``, with the interface of the reference's object."""
        adapt = self.adapters.get(key, self.adapt)
        return target if adapt is None else adapt(target)


def load_provider(ref: str) -> Provider:
    """Return the provider for ``ref``: ``vllm``, ``mutants:NAME``, ``package.module`` or ``path/to/file.py``.

    ``vllm:path/to/file.py`` is a file of functions that take and return vLLM's objects.

    Raises:
        ProviderLoadError: nothing of that name can be imported, or importing it fails.
    """
    if ref.partition(":")[0] == "vllm":
        from attncheck.harness.providers.vllm import load_vllm  # which imports this module

        return load_vllm(ref)
    if ref.startswith(PREFIX):
        first, second = mutant_utilities(ref.removeprefix(PREFIX))
        return Provider(name=ref, ref=ref, version=attncheck.__version__, modules=[first], v0=[second])
    found = provider_file(ref, ref) if ref.endswith(".py") else _module(ref)
    v0 = _v0_of(found)
    return Provider(
        name=Path(ref).stem if ref.endswith(".py") else ref,
        ref=ref,
        version=str(getattr(found, "__version__", "")),
        modules=[found],
        v0=[v0] if v0 is not None else [],
    )


def _v0_of(found: ModuleType) -> Any:
    """Return what a module offers as ``v0``: a submodule, or any object with attributes."""
    if hasattr(found, "__path__") and importlib.util.find_spec(f"{found.__name__}.v0") is not None:
        return _module(f"{found.__name__}.v0")
    return getattr(found, "v0", None)


def provider_file(ref: str, path: str) -> ModuleType:
    """Return the module in a file, for provider ``ref``.

    Raises:
        ProviderLoadError: it cannot be read or imported.
    """
    try:
        return registry.import_file(ref, Path(path))
    except BackendLoadError as error:
        raise ProviderLoadError(ref, error.reason) from error


def _module(ref: str) -> ModuleType:
    if not all(part.isidentifier() for part in ref.split(".")):
        raise ProviderLoadError(ref, "is neither a module's name nor a Python file")
    try:
        return import_module(ref)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{ref}.".startswith(f"{error.name}."):
            raise ProviderLoadError(ref, registry.import_failure(error)) from error
        raise ProviderLoadError(ref, f"no module {error.name!r} is installed; for a file, give its path") from error
    except (Exception, SystemExit) as error:
        raise ProviderLoadError(ref, registry.import_failure(error)) from error
