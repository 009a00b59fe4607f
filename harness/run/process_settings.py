"""Process-wide settings during an examination: float32 precision, torch's threads, the current device."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user sets the number of torch's threads."""


@contextmanager
def exact_float32() -> Iterator[None]:
    """Disable TF32 during the context, whatever the caller's setting, and restore the setting afterwards.

    torch has an old and a new setting, and refuses to read the old one if only the new one was set. Both are restored.
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
    """Return the number of torch threads for all checks except ``timing``; ``there``: the current number.

    It is 1 unless the environment sets a number: on the small tensors of a case, threads mostly wait for each other.
    """
    return there if any(os.environ.get(name) for name in THREAD_VARIABLES) else 1


@contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Use ``number`` threads for torch's CPU operators during the context."""
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
    """Make a GPU the current device during the context, as an engine's worker does.

    A kernel launched without an explicit device runs on the current one, wherever its tensors are.
    """
    if device.type != "cuda":
        yield
        return
    selected = torch.cuda.device(device)
    selected.__enter__()
    try:
        yield
    finally:
        with suppress(torch.AcceleratorError):  # raised on a lost device, which is reported elsewhere
            selected.__exit__(None, None, None)
