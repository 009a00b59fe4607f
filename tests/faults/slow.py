"""A backend that waits in each case while a file is there, for ten seconds at most."""

import time
from pathlib import Path
from typing import Any

import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl


class Impl(ReferenceImpl):
    def forward(self, *args: Any, **others: Any) -> torch.Tensor:
        for _ in range(200):
            if Path("hold").exists():
                time.sleep(0.05)
        return super().forward(*args, **others)


class Slow(ReferenceBackend):
    @staticmethod
    def get_impl_cls() -> type[Impl]:
        return Impl
