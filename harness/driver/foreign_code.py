"""Where foreign code is entered: each entry has a name, and whatever is raised there comes back with it.

What the code did to process-wide settings is undone when it returns.
"""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from attncheck.errors import InternalError
from attncheck.harness.driver.observation import Raised, capture_exception, printable

T = TypeVar("T")


class StageError(InternalError):
    """Carries what a stage of the contract raised up to the caller of a session."""

    def __init__(self, raised: Raised) -> None:
        self.raised = raised
        super().__init__(raised.stage)


def call_backend(name: str, call: Callable[[], T]) -> T:
    """The result of ``call``; what it raises comes back as a StageError that names the stage.

    A backend's ``sys.exit()`` is its failure, not the end of the run; only the user's Ctrl-C passes through.
    """
    try:
        with settings_kept():
            return call()
    except (StageError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise StageError(capture_exception(name, error)) from error


def declared_reasons(call: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """The reasons a declaration gives; a StageError where it raises, or answers with anything but a list of strings."""

    def ask() -> tuple[str, ...]:
        reasons: object = call()
        if not isinstance(reasons, list | tuple) or not all(isinstance(reason, str) and reason for reason in reasons):
            raise TypeError(f"the declaration returned {reasons!r}, which is no list of reasons in words")
        return tuple(map(printable, reasons))

    return call_backend("declaration", ask)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Keep Python from collecting garbage: what it takes, and what it frees, depends on what others have allocated."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def settings_kept() -> Iterator[None]:
    """Process-wide settings as they were before: the next backend, and attncheck itself, rely on them."""
    dtype, device, folder = torch.get_default_dtype(), torch.get_default_device(), _current_folder()
    grad, threads = torch.is_grad_enabled(), torch.get_num_threads()
    deterministic, precision = torch.are_deterministic_algorithms_enabled(), _matmul_precision()
    try:
        yield
    finally:
        torch.set_grad_enabled(grad)
        if precision is not None and _matmul_precision() != precision:
            torch.set_float32_matmul_precision(precision)
        # Setting these costs something even where nothing changed.
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:
            torch.use_deterministic_algorithms(deterministic)
        if folder is not None and _current_folder() != folder:
            os.chdir(folder)


def _current_folder() -> str | None:
    """Return the path of the current folder, or None if that folder was removed."""
    try:
        return os.getcwd()  # noqa: PTH109 (a Path costs several times as much, at every entry)
    except FileNotFoundError:
        return None


def _matmul_precision() -> str | None:
    """The setting for float32 products; None where its parts were set apart, and torch cannot say it in a word."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
