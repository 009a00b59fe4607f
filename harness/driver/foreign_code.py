"""Enter backend code: name the stage, wrap whatever it raises, and restore the process-wide settings afterwards."""

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from inspect import getattr_static
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from attncheck.errors import BackendUnavailableError, InternalError
from attncheck.harness.device import accelerator_of
from attncheck.harness.driver.observation import Raised, capture_exception, printable

if TYPE_CHECKING:
    from attncheck.backends.contract import AttentionBackend
    from attncheck.cases.model import Case

T = TypeVar("T")


class StageError(InternalError):
    """A stage of the contract raised. ``raised``: the stage and its exception.

    A check that need not judge the exception itself lets it pass: it becomes the record of the check.
    """

    def __init__(self, raised: Raised) -> None:
        self.raised = raised
        super().__init__(raised.stage)


@contextmanager
def stage_named(words: str) -> Iterator[None]:
    """Append ``words``, such as "of a second layer", to the stage of a StageError raised inside."""
    try:
        yield
    except StageError as failure:
        raise StageError(replace(failure.raised, stage=f"{failure.raised.stage} {words}")) from failure


def call_backend(
    name: str,
    call: Callable[[], T],
    device: torch.device | None = None,
    within: AbstractContextManager[object] = nullcontext(),  # noqa: B008 (it has no state)
) -> T:
    """Return the result of ``call``; raise a StageError that names the stage if it raises.

    ``device``: where its kernels run; their errors belong to this call, too. ``within``: a context for the call alone.
    A backend's ``sys.exit()`` counts as its failure and does not end the run. Only KeyboardInterrupt passes through,
    and BackendUnavailableError, by which a backend states that a part is missing here.
    """
    before = _settings()
    try:
        try:
            with within:
                result = call()
            if device is not None:
                wait_for(device, name)
            return result
        finally:
            _restore(before)
    except (StageError, KeyboardInterrupt, BackendUnavailableError):
        raise
    except BaseException as error:
        raise StageError(capture_exception(name, error)) from error


def wait_for(device: torch.device, name: str) -> None:
    """Wait until an accelerator has done the work of the backend's call ``name``. Do nothing for a CPU.

    A frame of the stack gets this name: it shows the call if the wait does not end.
    """
    accelerator = accelerator_of(device)
    if accelerator is not None:
        named = _synchronize.__code__.replace(co_name=name)
        FunctionType(named, globals())(accelerator.module(), device)


def _synchronize(module: Any, device: torch.device) -> None:
    module.synchronize(device)


def declared_reasons(call: Callable[[], Sequence[str]]) -> tuple[str, ...]:
    """Return the reasons a declaration gives, made printable.

    Raises StageError if the declaration raises, or returns anything but a list or tuple of non-empty strings.
    """

    def read_reasons() -> tuple[str, ...]:
        reasons: object = call()
        if not isinstance(reasons, list | tuple) or not all(isinstance(reason, str) and reason for reason in reasons):
            raise TypeError(f"the declaration returned {reasons!r}, which is no list of reasons in words")
        return tuple(map(printable, reasons))

    return call_backend("declaration", read_reasons)


def unsupported_reasons(backend: "type[AttentionBackend]", case: "Case") -> tuple[str, ...]:
    """Return why ``backend`` does not support ``case``; empty if it does. Raises as :func:`declared_reasons`."""
    return declared_reasons(lambda: backend.unsupported_reasons(case.layer, case.cache, case.batch))


def unavailable_case_reasons(backend: "type[AttentionBackend]", case: "Case", device: str) -> tuple[str, ...]:
    """Return why ``backend`` cannot run ``case`` on ``device`` of this machine; empty if it can.

    Raises as :func:`declared_reasons`.
    """
    return declared_reasons(lambda: backend.unavailable_case_reasons(device, case.layer, case.cache, case.batch))


# Read tensors that a backend was given or hands back, without running its code.
#
# A backend may replace the class of a tensor object, change its shape in place, or resize its memory.


def as_plain(given: object) -> Tensor | None:
    """Return a torch.Tensor with the memory of ``given``; None if it is no tensor, nested, or its class runs own code.

    A subclass without ``__torch_function__`` and ``__torch_dispatch__`` of its own, such as a Parameter, is like a
    Tensor in every operation of torch. Attributes that were set on the object do not count.
    """
    kind = type(given)
    if not issubclass(kind, Tensor):
        return None
    if kind not in (Tensor, Parameter):  # getattr_static is too slow for a call under the clock
        for name in ("__torch_function__", "__torch_dispatch__"):
            if getattr_static(kind, name) not in (getattr_static(Tensor, name), getattr_static(Parameter, name)):
                return None
    with torch._C.DisableTorchFunctionSubclass():  # leaves the code of the class out
        plain = Tensor.as_subclass(cast(Tensor, given), Tensor).detach()
    return None if plain.is_nested else plain


def kind_of(given: object) -> str:
    """Return what ``given`` is, in words, for a message that it is no plain tensor."""
    if type(given) is Tensor and given.is_nested:
        return "a nested tensor"
    return "None" if given is None else f"a {type(given).__name__}"


def is_like(given: object, like: Tensor) -> bool:
    """Return whether ``given`` is a plain tensor whose memory is there, and has shape, dtype and device of ``like``."""
    alias = as_plain(given)
    if alias is None:
        return False
    facts = alias.shape, alias.dtype, alias.device, alias.layout
    return facts == (like.shape, like.dtype, like.device, like.layout) and has_its_memory(alias)


def has_its_memory(tensor: Tensor) -> bool:
    """Return whether the storage still holds all elements of ``tensor``; it can be resized behind its tensors."""
    with torch._C.DisableTorchFunction():  # a mode that records a graph would take this for work of the backend
        plain = Tensor.as_subclass(tensor, Tensor)  # the backend may have set attributes on the object
        if not plain.numel():
            return True
        last = sum((size - 1) * step for size, step in zip(plain.shape, plain.stride(), strict=True))
        return (plain.storage_offset() + last + 1) * plain.element_size() <= plain.untyped_storage().nbytes()


def require_memory(tensor: Tensor, name: str, stage: str) -> None:
    """Raise a StageError of ``stage`` if the backend resized the memory of ``tensor``: to read it would crash."""
    if not has_its_memory(tensor):
        left = tensor.untyped_storage().nbytes()
        message = f"{name} has {left} of its {tensor.nbytes} bytes left: the backend resized its storage"
        raise StageError(Raised(stage, "ResizedStorage", message))


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disable Python's garbage collector: how long it takes and what it frees depend on unrelated allocations."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def settings_kept() -> Iterator[None]:
    """Restore the process-wide settings on exit, because attncheck and the next backend rely on them."""
    before = _settings()
    try:
        yield
    finally:
        _restore(before)


class _Settings(NamedTuple):
    """Process-wide settings.

    ``device``: None if torch's own default holds. ``folder``: None if it was removed. ``precision``: None if torch has
    no single word for it.
    """

    grad: bool
    dtype: torch.dtype
    device: torch.device | None
    threads: int
    deterministic: bool
    folder: str | None
    precision: str | None


def _settings() -> _Settings:
    return _Settings(
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        # torch keeps a default device as a mode on this stack. Its own search of the stack takes 7 us.
        torch.get_default_device() if torch._C._len_torch_function_stack() else None,
        torch.get_num_threads(),
        torch.are_deterministic_algorithms_enabled(),
        _current_folder(),
        _matmul_precision(),
    )


def _restore(before: _Settings) -> None:
    now = _settings()
    if now == before:
        return
    torch.set_grad_enabled(before.grad)
    if before.precision is not None and now.precision != before.precision:
        torch.set_float32_matmul_precision(before.precision)
    if now.dtype != before.dtype:
        torch.set_default_dtype(before.dtype)
    if now.device != before.device:
        torch.set_default_device(None if before.device is None or before.device.type == "cpu" else before.device)
    if now.threads != before.threads:
        torch.set_num_threads(before.threads)
    if now.deterministic != before.deterministic:
        torch.use_deterministic_algorithms(before.deterministic)
    if before.folder is not None and now.folder != before.folder:
        os.chdir(before.folder)


def _current_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 (a Path costs several times as much, at every entry)
    except FileNotFoundError:
        return None


def _matmul_precision() -> str | None:
    """Return the precision of float32 products, or None if torch has no single word for a mix of its parts."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
