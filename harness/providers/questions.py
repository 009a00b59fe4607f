"""What a provider is asked: a subject is one public name, a question one call of it."""

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
    """One call, its arguments by keyword in the reference's objects.

    ``tags`` say what is special about it, for departures to refer to. ``refused``: the reference must refuse this one.
    """

    text: str
    arguments: Mapping[str, Any]
    tags: frozenset[str] = frozenset()
    refused: bool = False

    def copies(self) -> dict[str, Any]:
        """The arguments for one call: deep copies, for a provider may write into them."""
        return deepcopy(dict(self.arguments))


@dataclass(frozen=True)
class SubjectSetting:
    """What questions are made from: the batches of the run, and the device of their tensors."""

    batches: Sequence[ProviderBatch]
    device: torch.device


def call_directly(target: Callable[..., Any], **arguments: Any) -> Any:
    """The plain way to ask: ``target(**arguments)``."""
    return target(**arguments)


@dataclass(frozen=True)
class Subject:
    """One public name of the reference and how it is examined.

    ``ask(target, *helpers, **arguments)`` puts a question to the object of that name and returns what is compared;
    ``helpers`` are further names of the same module it needs. ``is_function``: its parameters are compared, too.
    ``newer``: parameters that older versions lack. A function without one is not asked about it. ``ours``: the
    reference's object that has them, where the one of that name has not.
    """

    name: str
    questions: Callable[[SubjectSetting], Iterable[SubjectCall]]
    ask: Callable[..., Any] = call_directly
    generation: Generation = "v1"
    helpers: tuple[str, ...] = ()
    is_function: bool = True
    newer: frozenset[str] = frozenset()
    ours: Callable[..., Any] | None = None

    @property
    def key(self) -> str:
        """The name, with its generation where that is not today's: several names mean something else in v0."""
        return self.name if self.generation == "v1" else f"{self.generation}.{self.name}"


def are_apart(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share no storage, so that writing into one leaves the other alone."""
    return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


def subject_call(text: str, *tags: str, refused: bool = False, **arguments: Any) -> SubjectCall:
    """A question, its arguments as keywords."""
    return SubjectCall(text, arguments, frozenset(tags), refused)
