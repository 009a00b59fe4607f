"""Whether what stands where nobody should look shows in an answer, each time it stands there.

Must not know: functions, problems, what is poisoned.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

Answer = TypeVar("Answer")
Fill = TypeVar("Fill")


class Poisoning(Generic[Answer, Fill]):
    """Calls of one function on one question, with and without poison, told apart by their bits.

    ``call`` of None is the clean call, ``first`` its answer; ``moved`` gives bool, one a row, for two answers that are
    not equal bit for bit, ``wrong`` for one outside of the budget. A function that does not repeat itself on equal
    input is held to the budget.
    """

    def __init__(
        self,
        call: Callable[[Fill | None], Answer],
        first: Answer,
        moved: Callable[[Answer, Answer], Tensor],
        wrong: Callable[[Answer], Tensor],
    ) -> None:
        self._call, self._first, self._moved, self._wrong = call, first, moved, wrong
        self.bitwise = not bool(moved(first, call(None)).any())

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader should know of how answers were compared."""
        if self.bitwise:
            return ()
        return ("compared within the budget: the function does not repeat itself on equal input",)

    def reached(self, fill: Fill) -> Tensor:
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
