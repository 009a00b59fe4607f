"""Subjects and their questions: a subject is one public name, a question is one call of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from attncheck.harness.providers.batches import ProviderBatch

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


def subject_call(text: str, *tags: str, refused: bool = False, **arguments: Any) -> SubjectCall:
    """Return a question with its arguments as keywords."""
    return SubjectCall(text, arguments, frozenset(tags), refused)
