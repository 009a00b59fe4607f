"""A refusal is what a backend raises on purpose; whatever happens to be of the same class is none."""

from enum import Enum

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.backends.kernel import kernel_backend
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.driver.observation import capture_exception

Mode = Enum("Mode", ["FAST"])
TENSOR = torch.ones(1, 2, 2)
NO_KEYS = None


def in_words():
    raise ValueError("a window of 3 keys is not supported")


def other_class():
    raise RuntimeError("a window of 3 keys is not supported")


def without_words():
    raise NotImplementedError


def helper_in_words():
    in_words()


def library_in_own_words():
    try:
        torch.nn.functional.gelu(TENSOR, approximate="exactly")
    except RuntimeError as error:
        raise NotImplementedError("this approximation") from error


def unpacking():
    _rows, _heads = TENSOR.shape


def signature_of_an_impl():
    def construct(num_heads): ...

    construct(8, sinks=None)


def signature_of_a_latent_impl():
    def construct(num_heads, *, kv_lora_rank): ...

    construct(8)


def signature_of_a_kernel():
    def kernel(query): ...

    kernel(8, window=3)


def raised_by(call):
    with pytest.raises(StageError) as caught:
        call_backend("construct", call)
    return caught.value.raised


@pytest.mark.parametrize(
    ("call", "is_refusal"),
    [
        (in_words, True),
        (helper_in_words, True),
        (lambda: ReferenceImpl(8, 64, 0.1, 3), True),
        (lambda: kernel_backend(lambda: None, name="short"), True),
        (library_in_own_words, True),
        (signature_of_an_impl, True),
        (signature_of_a_latent_impl, True),
        (signature_of_a_kernel, False),
        (unpacking, False),
        (lambda: NO_KEYS[0], False),
        (lambda: torch.nn.functional.embedding_bag(TENSOR.long(), TENSOR[0]), False),
        (lambda: torch.nn.functional.max_pool2d(TENSOR, 1, return_indices=3, stride="a"), False),
        (lambda: Mode("slow"), False),
        (without_words, False),
        (other_class, False),
    ],
)
def test_what_a_backend_raises_on_purpose_is_a_refusal(call, is_refusal):
    assert raised_by(call).is_refusal is is_refusal


def test_an_operator_refuses_for_its_backend():
    @torch.library.custom_op("attncheck_tests::refusing", mutates_args=())
    def refusing(rows):
        raise NotImplementedError(f"rows of {rows.dtype}")

    assert raised_by(lambda: refusing(TENSOR)).is_refusal


def test_the_package_that_is_entered_refuses_for_itself():
    installed = str(torch.__file__).replace("torch/__init__", "kernels/attention")
    space = {"__name__": "kernels.attention"}
    exec(compile("def refuse():\n    raise ValueError('no window')", installed, "exec"), space)
    assert raised_by(space["refuse"]).is_refusal

    def calls_it():
        space["refuse"]()

    assert not raised_by(calls_it).is_refusal


def test_a_full_gpu_is_described_without_its_other_processes():
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


def test_an_exception_without_a_message_is_still_named():
    class MuteError(Exception):
        def __str__(self):
            raise RuntimeError

    assert "RuntimeError" in capture_exception("forward", MuteError()).message


def test_any_other_exception_is_reported_unchanged():
    with pytest.raises(ValueError, match="no") as caught:
        raise ValueError("no")
    raised = capture_exception("forward", caught.value)
    assert raised.message == "no"
    assert raised.trace.endswith('raise ValueError("no")\nValueError: no\n')
