"""Trees of draft tokens as a builder meets them: vLLM's ``speculative_token_tree``, and the mask it stands for.

Must not know: problems, how anything is computed.
"""

import ast
from typing import Any

import torch
from torch import Tensor


def tree_of(vllm_config: Any, device: torch.device) -> Tensor | None:
    """The tree in which drafts are verified: bool ``[Q, Q]``, which new key each new row may see. None: no tree."""
    speculative = getattr(vllm_config, "speculative_config", None)
    written = None if speculative is None else speculative.speculative_token_tree
    return None if written is None else tree_mask(written).to(device)


def tree_mask(speculative_token_tree: str) -> Tensor:
    """Bool ``[Q, Q]``, Q being one more than the tree has nodes: row 0 is the root, which the string leaves out.

    Each node is written as the choices that lead to it, parents first. A row sees itself and its ancestors.
    ``ValueError`` for a string that is no such list.

    >>> tree_mask("[(0,), (1,), (0, 0)]").int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """
    nodes = _nodes(speculative_token_tree)
    row_of = {node: row for row, node in enumerate(nodes)}
    mask = torch.zeros(len(nodes), len(nodes), dtype=torch.bool)
    for row, node in enumerate(nodes):
        for depth in range(len(node) + 1):
            ancestor = row_of.get(node[:depth])
            if ancestor is None or ancestor > row:
                raise ValueError(f"speculative_token_tree {speculative_token_tree}: {node} stands before its parent")
            mask[row, ancestor] = True
    return mask


def _nodes(written: str) -> list[tuple[int, ...]]:
    try:
        nodes = [tuple(node) for node in ast.literal_eval(written)]
    except (ValueError, SyntaxError, TypeError) as error:
        raise ValueError(f"speculative_token_tree {written!r} is no list of tuples of choices") from error
    if len(set(nodes)) != len(nodes) or () in nodes:
        raise ValueError(f"speculative_token_tree {written!r}: every node stands once, and the root is left out")
    return [(), *nodes]
