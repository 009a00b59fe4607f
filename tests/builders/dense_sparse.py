"""Sparse attention as a dense matrix product, in numpy: the second formulation, from the definition."""

import numpy as np


def dense_sparse_attention(query, key, value, chosen, scale):
    """Return output ``[T, H, V]`` of one request: softmax over a 0/1 matrix of chosen keys.

    query [T, H, D]; key [S, H, D]; value [S, H, V]; chosen [T, K] int, negative for none.
    """
    rows, heads = query.shape[:2]
    matrix = np.zeros((rows, key.shape[0]))
    for row in range(rows):
        for position in chosen[row]:
            if position >= 0:
                matrix[row, position] = 1.0
    output = np.zeros((rows, heads, value.shape[2]))
    for head in range(heads):
        weights = np.exp(scale * (query[:, head] @ key[:, head].T)) * matrix
        output[:, head] = (weights @ value[:, head]) / weights.sum(axis=1, keepdims=True)
    return output
