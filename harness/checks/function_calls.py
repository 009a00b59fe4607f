"""Call functions that a backend offers, validate what they return, and detect poison that reaches it."""

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
    """A result that is not a tensor of the right shape, dtype and device. ``finding`` describes it."""

    def __init__(self, finding: Broken) -> None:
        self.finding = finding
        super().__init__(finding.summary)


def call(
    name: str, function: Function, arguments: Mapping[str, Tensor | None], options: Mapping[str, object], *written: str
) -> tuple[object, tuple[str, ...]]:
    """Return what ``function`` returns, and the names of the arguments whose memory it changed.

    ``arguments`` are passed by position, ``options`` by keyword. The memory around a view counts as part of it.
    Arguments named in ``written`` may change. Raise StageError, under the function's name, if the function raises.
    """
    watched = {key: value for key, value in arguments.items() if value is not None and key not in written}
    before = {key: flat_bytes(tensor).clone() for key, tensor in watched.items()}

    def enter() -> object:
        # Detached aliases, so that the function cannot change attributes of our tensor objects.
        given = [value if value is None else value.detach() for value in arguments.values()]
        with torch.no_grad():
            return function(*given, **options)

    devices = [value.device for value in arguments.values() if value is not None]
    returned = call_backend(name, enter, devices[0] if devices else None)
    return returned, tuple(key for key, tensor in watched.items() if not torch.equal(flat_bytes(tensor), before[key]))


def as_tensor(name: str, value: object, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``value`` in float64, if it is a tensor of the shape and device of ``like``.

    Its dtype must be ``dtype``, float32 or float64, since an unrounded result is allowed. Otherwise raise FormError.
    """
    if not isinstance(value, Tensor):
        raise FormError(Broken(f"{name} is a {type(value).__name__}, not a tensor"))
    dtypes = tuple(dict.fromkeys((dtype, torch.float32, torch.float64)))
    *most, last = (str(wide).removeprefix("torch.") for wide in dtypes)
    allowed = f"{', '.join(most)} or {last}"
    facts: tuple[tuple[str, object, object, bool], ...] = (
        ("shape", tuple(value.shape), tuple(like.shape), value.shape == like.shape),
        ("device", value.device, like.device, value.device == like.device),
        ("dtype", str(value.dtype).removeprefix("torch."), allowed, value.dtype in dtypes),
    )
    for fact, got, wanted, fits in facts:
        if not fits:
            raise FormError(Broken(f"{name} has {fact} {got}, expected {wanted}"))
    return value.double()


def is_answer(got: Tensor, answer: Tensor, budget: Budget, dtype: torch.dtype) -> bool:
    """Return whether ``got`` equals ``answer`` in every row and head, up to the budget or the rounding to ``dtype``.

    Both are float64 ``[T, H, Dv]``. ``budget`` is that of the truth; a wrong ``answer`` may be much larger than the
    truth, so an error of twice the machine epsilon of ``dtype`` relative to ``answer`` is allowed as well.
    """
    error = torch.linalg.vector_norm(got - answer, dim=-1)
    rounding = 2 * torch.finfo(dtype).eps * torch.linalg.vector_norm(answer, dim=-1)
    return bool(((share_of_budget(got - answer, budget) <= 1) | (error <= rounding)).all())


class Poisoning(Generic[_Answer, _Fill]):
    """Calls of one function on one input, with and without poison, compared bit for bit.

    ``call(None)`` is the clean call, and ``first`` its result. ``moved`` returns bool, one per row: where two results
    differ in any bit. ``wrong`` does so where a result is outside the budget. A function that is not deterministic on
    equal input is compared within the budget instead.
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
        """Return notes on how results were compared. Empty if bit for bit."""
        if self.bitwise:
            return ()
        return ("compared within the allowed error: equal input gives different bits",)

    def reached(self, fill: _Fill) -> Tensor:
        """Return bool, one per row: where ``fill`` changes the result twice while the clean result stays the same.

        Compare within the budget instead if the clean result changes.
        """
        answer = self._call(fill)
        if self.bitwise:
            rows = self._moved(self._first, answer)
            if not bool(rows.any()):
                return rows
            if not bool(self._moved(self._first, self._call(None)).any()):
                return rows & self._moved(self._first, self._call(fill))
            self.bitwise = False
        return self._wrong(answer) & ~self._wrong(self._first)
