"""Foreign code: its exceptions and refusals, and the tensors that it hands back or changes in place."""

import os
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.kernel import kernel_backend
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.driver.observation import capture_exception
from attncheck.harness.run.evaluate import Examiner
from attncheck.harness.run.outcomes import OURSELVES
from attncheck.harness.run.selection import RunPlan

SETTINGS = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "device": (torch.get_default_device, lambda: torch.set_default_device("meta")),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(False)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "determinism": (torch.are_deterministic_algorithms_enabled, lambda: torch.use_deterministic_algorithms(True)),
    "products": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "folder": (Path.cwd, lambda: os.chdir("/")),
}


def test_a_folder_that_is_gone_is_left(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def foreign():
        Path("gone").mkdir()
        os.chdir("gone")
        (tmp_path / "gone").rmdir()
        return "answer"

    assert call_backend("forward", foreign) == "answer"
    assert Path.cwd() == tmp_path


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_settings_are_as_before(name, error, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, change = SETTINGS[name]
    before = read()

    def foreign():
        change()
        assert read() != before, "the change must be one"
        if error is not None:
            raise error(name)

    if error is None:
        call_backend("forward", foreign)
    elif error is KeyboardInterrupt:  # only the user's interrupt passes through
        with pytest.raises(KeyboardInterrupt):
            call_backend("forward", foreign)
    else:
        with pytest.raises(StageError) as failure:
            call_backend("forward", foreign)
        assert failure.value.raised.error_type == "ValueError"
    assert read() == before


CHECKS = ("numerics", "lse", "cache_write", "determinism")


class Hostile(torch.Tensor):
    """A tensor that no function of torch takes."""

    @classmethod
    def __torch_function__(cls, *_, **__):
        raise RuntimeError("hands off")


class Harmless(torch.Tensor):
    """A tensor in every operation."""


class HostileDict(dict[str, Any]):
    def __contains__(self, _):
        raise RuntimeError("hands off")


def backend_of(deed=None, **members):
    """Return the reference with ``deed(returned, query, cache, lse)``, which replaces what ``forward`` returns."""

    class Impl(ReferenceImpl):
        def forward(self, layer, query, key, value, cache, *args, **named):
            returned = super().forward(layer, query, key, value, cache, *args, **named)
            return returned if deed is None or args[0] is None else deed(returned, query, cache, named["output_lse"])

    made = type("Tried", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl), **members})
    return LoadedBackend("TRIED", "tried", made, "", "a test")


def resized(tensor, returned):
    tensor.untyped_storage().resize_(0)
    return returned


def enlarged(tensor, returned):
    storage = tensor.untyped_storage()
    storage.resize_(2 * storage.nbytes())
    return returned


def nested(tensor):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor(list(tensor))


def changed_class(tensor, returned):
    tensor.__class__ = Hostile
    return returned


def with_attributes(tensor, returned):
    for name in ("numel", "data_ptr", "stride", "detach", "storage_offset", "untyped_storage"):
        setattr(tensor, name, None)
    return returned


def examined(backend, make_case):
    case = make_case((13, 13), dtype="float32")
    plan = RunPlan((case,), (backend,), CHECKS)
    return {record.check: record for record in Examiner(plan).run()}


def assert_fails(records, checks, words):
    """Check that these checks and no others fail by the backend, with ``words``."""
    fallen = {check: record for check, record in records.items() if record.outcome != "passed"}
    assert fallen.keys() == checks
    for record in fallen.values():
        text = record.summary if record.outcome == "failed" else f"{record.stage}: {record.message}"
        assert words in text
        assert OURSELVES not in text


DEEDS = [
    ("query resized", lambda out, query, cache, lse: resized(query, out), {*CHECKS}, "query has 0 of its"),
    ("output resized", lambda out, query, cache, lse: resized(out, out), {*CHECKS}, "output has 0 of its"),
    ("LSE resized", lambda out, query, cache, lse: resized(lse, out), {*CHECKS}, "output_lse has 0 of its"),
    ("cache resized", lambda out, query, cache, lse: resized(cache, out), {*CHECKS}, "kv_cache has 0 of its"),
    ("cache enlarged", lambda out, query, cache, lse: enlarged(cache, out), set(), ""),
    ("nested", lambda out, *_: nested(out), {"numerics"}, "forward returned a nested tensor; the contract requires a"),
    ("subclass", lambda out, *_: out.as_subclass(Hostile), {"numerics"}, "forward returned a Hostile; the contract"),
    ("tuple", lambda out, *_: (out, None), {"numerics"}, "forward returned a tuple"),
    ("device", lambda out, *_: out.to("meta"), {"numerics"}, "forward returned a tensor of device meta"),
    ("class of query", lambda out, query, *_: changed_class(query, out), {"cache_write"}, "inputs were changed: query"),
    ("axes", lambda out, *_: out.transpose_(0, 1), {"numerics"}, "returned the output in the shape [8, 13, 64]"),
    ("harmless subclass", lambda out, *_: out.as_subclass(Harmless), set(), ""),
    ("parameter", lambda out, *_: torch.nn.Parameter(out), set(), ""),
    ("attributes", lambda out, query, *_: with_attributes(query, with_attributes(out, out)), set(), ""),
]


@pytest.mark.parametrize(("deed", "checks", "words"), [pytest.param(*row, id=name) for name, *row in DEEDS])
def test_a_tensor_that_is_spoilt_costs_the_backend_its_checks(make_case, deed, checks, words):
    assert_fails(examined(backend_of(deed), make_case), checks, words)


def test_an_object_whose_code_raises_where_it_is_read_is_the_backends(make_case):
    records = examined(backend_of(functions=staticmethod(HostileDict)), make_case)
    assert_fails(records, {"cache_write"}, "check cache_write: hands off")


def test_an_extent_that_is_no_integer_is_named(make_case):
    def shape(num_blocks, block_size, num_kv_heads, head_size):
        return (2.0, num_blocks, block_size, num_kv_heads, head_size)

    records = examined(backend_of(get_kv_cache_shape=staticmethod(shape)), make_case)
    assert_fails(records, {*CHECKS}, "every extent must be an integer")


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
    def refusing(rows: torch.Tensor) -> torch.Tensor:
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
