"""Random integers that are equal on every machine and in every version of numpy and torch.

Philox's raw 64-bit stream is fixed by its definition (Salmon et al. 2011), unlike the distributions drawn from it. So
everything here derives from raw words by integer arithmetic.
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
        """Return an int8 tensor of the given shape, uniform over -127..127 (-128 becomes 0, so that the mean is 0)."""
        count = math.prod(shape)
        words = self._philox.random_raw((count + 7) // 8)
        values = np.asarray(words, dtype="<u8").view(np.int8)[:count].reshape(shape)
        return torch.from_numpy(np.where(values == -128, np.int8(0), values))

    def uniform(self, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        """Return a tensor of the given shape, uniform over [-2, 2) in steps of 2**-30, to fill every tested mantissa.

        Float32 instead of float64 halves the memory; a half-precision dtype rounds both to the same numbers.
        """
        count = math.prod(shape)
        words = self._philox.random_raw((count + 1) // 2)
        values = np.asarray(words, dtype="<u8").view(np.int32)[:count].reshape(shape)
        return torch.from_numpy(values).to(dtype).mul_(2.0**-30)

    def integers(self, count: int, below: int) -> Tensor:
        """Return int64 ``[count]``, each in ``range(below)``."""
        words = np.asarray(self._philox.random_raw(count), dtype=np.uint64)
        # The bias of the remainder (below 2**-32) does not matter here.
        return torch.from_numpy((words >> np.uint64(1)).astype(np.int64) % below)

    def permutation(self, n: int) -> Tensor:
        """Return int64 ``[n]``: a random permutation of ``range(n)``."""
        words = np.asarray(self._philox.random_raw(n), dtype=np.uint64)
        return torch.from_numpy(np.argsort(words, kind="stable"))
