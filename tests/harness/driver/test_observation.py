"""A refusal is what a backend raises on purpose; whatever happens to be of the same class is none."""

from collections.abc import Callable
from enum import Enum

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.kernel import kernel_backend
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.driver.observation import Raised, capture_exception


class Mode(Enum):
    FAST = "fast"


def in_words() -> None:
    raise ValueError("a window of 3 keys is not supported")


def helper_in_words() -> None:
    in_words()


def by_our_base() -> None:
    ReferenceImpl(8, 64, 0.1, 3)


def by_our_wrapper() -> None:
    kernel_backend(lambda: None, name="short")


def library_in_own_words() -> None:
    try:
        torch.nn.functional.gelu(torch.ones(1), approximate="exactly")
    except RuntimeError as error:
        raise NotImplementedError("this approximation") from error


def signature_without_sinks() -> None:
    def construct(num_heads: int) -> None: ...

    construct(8, sinks=None)  # type: ignore[call-arg]


def signature_for_latent_layers() -> None:
    def construct(num_heads: int, *, kv_lora_rank: int) -> None: ...

    construct(8)  # type: ignore[call-arg]


def unpacking() -> None:
    _rows, _heads = torch.ones(2, 3, 4).shape


def subscript() -> None:
    keys: torch.Tensor | None = None
    keys[0]  # type: ignore[index]


def signature_of_a_kernel() -> None:
    def kernel(query: int) -> None: ...

    kernel(8, window=3)  # type: ignore[call-arg]


def torch_itself() -> None:
    torch.nn.functional.embedding_bag(torch.ones(2, 2, 2, dtype=torch.int64), torch.ones(2, 2))


def torch_in_python() -> None:
    torch.nn.functional.max_pool2d(torch.ones(1, 2, 2), 1, return_indices=3, stride="a")  # type: ignore[arg-type]


def standard_library() -> None:
    Mode("slow")


def without_words() -> None:
    raise NotImplementedError


def other_class() -> None:
    raise RuntimeError("a window of 3 keys is not supported")


def raised_by(call: Callable[[], None]) -> Raised:
    with pytest.raises(StageError) as caught:
        call_backend("construct", call)
    return caught.value.raised


@pytest.mark.parametrize(
    "call",
    [
        in_words,
        helper_in_words,
        by_our_base,
        by_our_wrapper,
        library_in_own_words,
        signature_without_sinks,
        signature_for_latent_layers,
    ],
)
def test_what_a_backend_raises_on_purpose_is_a_refusal(call: Callable[[], None]) -> None:
    assert raised_by(call).is_refusal


@pytest.mark.parametrize(
    "call",
    [
        unpacking,
        subscript,
        signature_of_a_kernel,
        torch_itself,
        torch_in_python,
        standard_library,
        without_words,
        other_class,
    ],
)
def test_what_merely_happens_is_none(call: Callable[[], None]) -> None:
    assert not raised_by(call).is_refusal


def test_an_operator_refuses_for_its_backend() -> None:
    @torch.library.custom_op("attncheck_tests::refusing", mutates_args=())
    def refusing(rows: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError(f"rows of {rows.dtype}")

    assert raised_by(lambda: refusing(torch.ones(1))).is_refusal  # type: ignore[arg-type, return-value]


def test_the_package_that_is_entered_refuses_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = str(torch.__file__).replace("torch/__init__", "kernels/attention")
    spaces = {name: {"__name__": name} for name in ("kernels.attention", "other.library")}
    exec(compile("def refuse():\n    raise ValueError('no window')", installed, "exec"), spaces["kernels.attention"])
    refuse = spaces["kernels.attention"]["refuse"]
    assert raised_by(refuse).is_refusal  # type: ignore[arg-type]

    def calls_it() -> None:
        refuse()  # type: ignore[operator]

    assert not raised_by(calls_it).is_refusal


def test_a_full_gpu_is_described_without_its_other_processes() -> None:
    """The text of torch 2.11 on a GPU that several processes share, shortened."""
    message = (
        "CUDA out of memory. Tried to allocate 32768.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
        "124.83 GiB is free. Process 670 has 712.00 MiB memory in use. Including non-PyTorch memory, this process has "
        "820.00 MiB memory in use. Process 628 has 866.00 MiB memory in use. Of the allocated memory 67.95 MiB is "
        "allocated by PyTorch, and 2.05 MiB is reserved by PyTorch but unallocated. If reserved but unallocated memory "
        "is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )
    assert capture_exception("forward", torch.OutOfMemoryError(message)).message == (
        "CUDA out of memory. Tried to allocate 32768.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which "
        "124.83 GiB is free. Including non-PyTorch memory, this process has 820.00 MiB memory in use. Of the allocated "
        "memory 67.95 MiB is allocated by PyTorch, and 2.05 MiB is reserved by PyTorch but unallocated."
    )
