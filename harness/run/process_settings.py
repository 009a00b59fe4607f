"""Settings of this process while a backend is examined: float32 products, torch's threads, the current device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables by which a user states how many threads torch has."""


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32 while anything is examined, whatever the caller's setting: float32 means float32.

    torch keeps two accounts of it and refuses to read the old one where only the new one was set: both are put back.
    """
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [product.fp32_precision for product in products]
    try:
        stated = torch.get_float32_matmul_precision()
    except RuntimeError:
        stated = None
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if stated is not None:
            torch.set_float32_matmul_precision(stated)
        for product, precision in zip(products, before, strict=True):
            product.fp32_precision = precision


def checking_threads(there: int) -> int:
    """Return how many threads torch uses for all checks but ``timing``; ``there``: how many it has.

    One, unless the environment states a number: the tensors of a case are small, and threads would wait for each other.
    """
    return there if any(os.environ.get(name) for name in THREAD_VARIABLES) else 1


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Use ``number`` threads for torch's operators on the CPU."""
    before = torch.get_num_threads()
    if before != number:
        torch.set_num_threads(number)
    try:
        yield
    finally:
        if before != number:
            torch.set_num_threads(before)


@contextmanager
def current_device(device: torch.device) -> Iterator[None]:
    """Makes a GPU the current one, as a worker does: a kernel launched by hand goes there, wherever its tensors are."""
    if device.type != "cuda":
        yield
        return
    selected = torch.cuda.device(device)
    selected.__enter__()
    try:
        yield
    finally:
        with suppress(torch.AcceleratorError):  # a lost device refuses this as well, and its loss is known
            selected.__exit__(None, None, None)
