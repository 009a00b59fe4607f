"""Empties a GPU's last-level cache, so that every sample reads its inputs from memory. Must not know: clocks, cases."""

import torch

from attncheck.harness.checks.timing.device_api import fill_zero


class Flush:
    """Call it to write over the whole L2 cache of a CUDA device, on the current stream. Elsewhere it does nothing.

    ``num_bytes``: of the buffer it writes, twice the cache; 0 where the device has none that is flushed. A CPU's
    caches are left alone: a sample would follow on the copying of its inputs, which fills them again.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.num_bytes = 0
        if torch.device(device).type == "cuda":
            self.num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=device) if self.num_bytes else None

    def __call__(self) -> None:
        """Flush."""
        if self._buffer is not None:
            fill_zero(self._buffer)
