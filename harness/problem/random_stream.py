"""Random integers that are the same on every machine, in every version of numpy and torch.

Philox's raw 64-bit stream is fixed by its definition (Salmon et al. 2011), unlike the distributions drawn from it, so
everything here is derived from raw words by integer arithmetic.
"""

import hashlib
import math

import numpy as np
import torch
from torch import Tensor


class RandomStream:
    """A stream of random integers determined by ``parts`` (a run's seed, a case's hash, ...)."""

    def __init__(self, *parts: object) -> None:
        digest = hashlib.sha256("\x1f".join(map(str, parts)).encode()).digest()
        self._philox = np.random.Philox(key=int.from_bytes(digest[:16], "little"))

    def int8(self, *shape: int) -> Tensor:
        """int8 tensor of the given shape, uniform over -127..127 (-128 becomes 0, so that the mean is 0)."""
        count = math.prod(shape)
        words = self._philox.random_raw((count + 7) // 8)
        values = np.asarray(words, dtype="<u8").view(np.int8)[:count].reshape(shape)
        return torch.from_numpy(np.where(values == -128, np.int8(0), values))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Tensor of the given shape, uniform over [-2, 2) in steps of 2**-30: it fills any mantissa we test.

        Float32 in place of float64 is half the memory; a half-precision dtype rounds both to the same numbers.
        """
        count = math.prod(shape)
        words = self._philox.random_raw((count + 1) // 2)
        values = np.asarray(words, dtype="<u8").view(np.int32)[:count].reshape(shape)
        return torch.from_numpy(values).to(dtype).mul_(2.0**-30)

    def integers(self, count: int, below: int) -> Tensor:
        """int64 ``[count]``, each in ``range(below)``; the remainder's bias (below 2**-32) does not matter here."""
        words = np.asarray(self._philox.random_raw(count), dtype=np.uint64)
        return torch.from_numpy((words >> np.uint64(1)).astype(np.int64) % below)

    def permutation(self, n: int) -> Tensor:
        """int64 ``[n]``: a random order of ``range(n)``."""
        words = np.asarray(self._philox.random_raw(n), dtype=np.uint64)
        return torch.from_numpy(np.argsort(words, kind="stable"))
