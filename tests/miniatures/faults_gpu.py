"""Backends whose work on a GPU fails: an illegal access, a kernel that does not end, a failed assertion, full memory.

``scripts/gpu-evidence`` runs them on a real GPU. Only steps of more than 20 rows fail.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPAImpl


@triton.jit
def store_far_away(first):
    tl.store(first + (1 << 40), 1.0)


@triton.jit
def wait_for_ever(flag):
    while tl.load(flag, volatile=True) == 0:
        pass


def failing(deed: Callable[[torch.device], object]) -> type[SDPABackend]:
    """Return a backend that is right, and then calls ``deed``."""

    class Impl(SDPAImpl):
        def forward(self, layer: Any, query: Any, *args: Any, **keywords: Any) -> Any:
            out = super().forward(layer, query, *args, **keywords)
            if len(query) > 20:
                deed(query.device)
            return out

    return type("Failing", (SDPABackend,), {"get_impl_cls": staticmethod(lambda: Impl)})


IllegalAccess = failing(lambda device: store_far_away[(1,)](torch.zeros(8, device=device)))
EndlessKernel = failing(lambda device: wait_for_ever[(1,)](torch.zeros(8, dtype=torch.int32, device=device)))
FailedAssertion = failing(lambda device: torch.zeros(4, device=device)[torch.full((4,), 99, device=device)])
FullMemory = failing(lambda device: torch.empty(2**45, dtype=torch.uint8, device=device))
