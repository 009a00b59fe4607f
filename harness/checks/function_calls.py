"""Calls functions that a backend offers, reads their answers, and finds where poison in their arguments shows."""

from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from attncheck.errors import InternalError
from attncheck.harness.checks.findings import Broken
from attncheck.harness.driver.foreign_code import call_backend
from attncheck.harness.driver.pool_memory import flat_bytes
from attncheck.harness.truth.tolerance import Budget, share_of_budget

Function = Callable[..., Any]

_Answer = TypeVar("_Answer")
_Fill = TypeVar("_Fill")


class FormError(InternalError):
    """Carries an answer that is no tensor of the right shape, dtype and device up to the caller of a check."""

    def __init__(self, finding: Broken) -> None:
        self.finding = finding
        super().__init__(finding.summary)


def call(
    name: str, function: Function, arguments: Mapping[str, Tensor | None], options: Mapping[str, object], *written: str
) -> tuple[object, tuple[str, ...]]:
    """What ``function`` returns for ``arguments`` by position and ``options`` by keyword, and what it changed.

    Names the arguments whose memory, that around a view included, is not what it was; those ``written`` may change.
    Raises StageError, under the function's name, for whatever the function raises.
    """
    watched = {key: value for key, value in arguments.items() if value is not None and key not in written}
    before = {key: flat_bytes(tensor).clone() for key, tensor in watched.items()}

    def enter() -> object:
        # Aliases: what the function does to a tensor object must not reach ours.
        given = [value if value is None else value.detach() for value in arguments.values()]
        with torch.no_grad():
            result: object = function(*given, **options)
        for device in {value.device for value in given if value is not None}:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return result

    returned = call_backend(name, enter)
    return returned, tuple(key for key, tensor in watched.items() if not torch.equal(flat_bytes(tensor), before[key]))


def as_tensor(name: str, value: object, like: Tensor, dtype: torch.dtype) -> Tensor:
    """``value``, of the shape and device of ``like``, in float64; an answer that was not rounded yet is an answer.

    FormError where it is no tensor of them, or neither of ``dtype`` nor of a wider one.
    """
    if not isinstance(value, Tensor):
        raise FormError(Broken(f"{name} is a {type(value).__name__}, not a tensor"))
    dtypes = tuple(dict.fromkeys((dtype, torch.float32, torch.float64)))
    allowed = ", ".join(str(wide).removeprefix("torch.") for wide in dtypes)
    facts: tuple[tuple[str, object, object, bool], ...] = (
        ("shape", tuple(value.shape), tuple(like.shape), value.shape == like.shape),
        ("device", value.device, like.device, value.device == like.device),
        ("dtype", str(value.dtype).removeprefix("torch."), allowed, value.dtype in dtypes),
    )
    for fact, got, wanted, fits in facts:
        if not fits:
            raise FormError(Broken(f"{name} has {fact} {got}, where {wanted} is right"))
    return value.double()


def is_answer(got: Tensor, answer: Tensor, budget: Budget, dtype: torch.dtype) -> bool:
    """Whether ``got`` is ``answer`` in every row and head, but for the budget or what rounding to ``dtype`` costs.

    Float64 ``[T, H, Dv]`` both; ``budget`` is that around the truth, beside which a wrong answer may be huge.
    """
    error = torch.linalg.vector_norm(got - answer, dim=-1)
    rounding = 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(answer, dim=-1)
    return bool(((share_of_budget(got - answer, budget) <= 1) | (error <= rounding)).all())


class Poisoning(Generic[_Answer, _Fill]):
    """Calls of one function on one question, with and without poison, told apart by their bits.

    ``call`` of None is the clean call, ``first`` its answer; ``moved`` gives bool, one a row, for two answers that are
    not equal bit for bit, ``wrong`` for one outside of the budget. A function that does not repeat itself on equal
    input is held to the budget.
    """

    def __init__(
        self,
        call: Callable[[_Fill | None], _Answer],
        first: _Answer,
        moved: Callable[[_Answer, _Answer], Tensor],
        wrong: Callable[[_Answer], Tensor],
    ) -> None:
        self._call, self._first, self._moved, self._wrong = call, first, moved, wrong
        self.bitwise = not bool(moved(first, call(None)).any())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how answers were compared."""
        if self.bitwise:
            return ()
        return ("compared within the budget: the function does not repeat itself on equal input",)

    def reached(self, fill: _Fill) -> Tensor:
        """Bool, one a row: where ``fill`` shows, and shows again, though the clean answer stays what it is."""
        answer = self._call(fill)
        if self.bitwise:
            rows = self._moved(self._first, answer)
            if not bool(rows.any()):
                return rows
            if not bool(self._moved(self._first, self._call(None)).any()):
                return rows & self._moved(self._first, self._call(fill))
            self.bitwise = False
        return self._wrong(answer) & ~self._wrong(self._first)
