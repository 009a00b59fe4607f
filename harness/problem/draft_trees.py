"""Trees of draft tokens: their visibility mask, and vLLM's notation for them.

A tree is given by the parent of each new row. Row 0 is the root, the last verified token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def ancestors(parents: Sequence[int]) -> Tensor:
    """Return bool ``[Q, Q]``: whether row ``m`` is row ``i`` itself or one of its ancestors. Parents precede children.

    >>> ancestors((-1, 0, 0, 1)).int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


def token_tree(parents: Sequence[int]) -> str:
    """Return the rows after the root as vLLM's ``speculative_token_tree``: the path of child indices to each row.

    >>> token_tree((-1, 0, 0, 1))
    '[(0,), (1,), (0, 0)]'
    """
    children = [0] * len(parents)
    paths: list[tuple[int, ...]] = []
    for parent in parents:
        if parent < 0:
            paths.append(())
            continue
        paths.append((*paths[parent], children[parent]))
        children[parent] += 1
    return str(paths[1:])
