"""Undeclared forms are tried one at a time, once a backend, and judged like a case of a suite."""

from collections.abc import Callable
from typing import Any

import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.checks.refusals import is_plain, undeclared_forms
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference.spec import FEATURES


class Bare(ReferenceBackend):
    """Declares one dtype, one head size, one page size, one layout, decoders, and no feature."""

    features = frozenset()
    supported_layouts = ("NHD",)
    supported_kv_cache_dtypes = ("auto",)
    supported_attn_types = ("decoder",)

    @classmethod
    def get_supported_dtypes(cls) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [64]

    @classmethod
    def get_supported_kernel_block_sizes(cls) -> list[Any]:
        return [16]


def records(backend: Any, *cases: Any) -> dict[str, Any]:
    loaded = LoadedBackend(name="mine", ref="./x.py:Mine", backend=backend, version="", origin="test")
    plan = RunPlan(cases=cases, backends=(loaded,), checks=("refusals",))
    return {record.case_id: record for record in Examiner(plan).run()}


def test_every_dimension_is_tried_by_itself(make_case: Any) -> None:
    case = make_case()
    tried = {form.changes: form.case for form in undeclared_forms(Bare, case, "cpu")}
    dimensions = {changes.split()[0] for changes in tried}
    assert dimensions == {
        *("dtype", "head_size", "head_size_v", "attn_type", "causal", "sliding_window", "logits_soft_cap", "alibi"),
        *("sinks", "output_quant", "kv_sharing", "layout", "block_size", "kv_cache_dtype"),
    }
    for form in undeclared_forms(Bare, case, "cpu"):
        assert len({reason.split(":")[0].split()[0] for reason in form.reasons}) <= 2, form
    assert {"attn_type encoder", "attn_type encoder_only", "attn_type encoder_decoder"} <= tried.keys()


def test_declared_forms_are_not_tried(make_case: Any) -> None:
    everything = type("All", (ReferenceBackend,), {"features": frozenset(FEATURES)})
    assert list(undeclared_forms(everything, make_case(), "cpu")) == []
    assert list(undeclared_forms(Bare, make_case(dtype="float32"), "cpu")) == []


def test_forms_are_tried_with_the_first_plain_case_alone(make_case: Any) -> None:
    window, first, second = make_case(name="a", sliding_window=9), make_case(name="b"), make_case((1, 9), name="c")
    assert [is_plain(case) for case in (window, first, second)] == [False, True, True]
    seen = records(Bare, window, first, second)
    assert "undeclared_tried" not in {*seen["a"].figures, *seen["c"].figures}
    assert seen["b"].figures["undeclared_tried"] >= 20


def test_a_right_answer_is_a_note(make_case: Any) -> None:
    record = records(Bare, make_case())["case"]
    assert record.outcome == "passed"
    (note,) = record.notes
    assert note == snapshot(
        "tried undeclared, and answered right without declaring it: dtype float16; dtype float32; head_size 72; head_size 128; head_size 272; attn_type encoder; attn_type encoder_only; attn_type encoder_decoder; sliding_window 9; logits_soft_cap 20.0; alibi True; sinks True; causal False; output_quant OutputQuantSpec(dtype='fp8_e4m3', scale=0.005); kv_sharing True; layout HND; kv_cache_dtype fp8, k_scale 0.3, v_scale 0.07; kv_cache_dtype fp8, k_scale (0.3, 0.6), v_scale (0.07, 0.14); kv_cache_dtype fp8_e5m2, k_scale 0.3, v_scale 0.07; kv_cache_dtype fp8_e5m2, k_scale (0.3, 0.6), v_scale (0.07, 0.14)"
    )
    assert "head_size 72" in note


def test_an_accepted_form_that_is_wrong_fails_and_is_described(make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def attend(self, layer: Any, query: Any, *rest: Any) -> None:
            super().attend(layer, query * (2 if self.head_size == 72 else 1), *rest)

    record = records(type("Wrong", (Bare,), {"get_impl_cls": staticmethod(lambda: Impl)}), make_case())["case"]
    assert record.outcome == "failed"
    assert record.summary.startswith(
        "tried undeclared with head_size 72: the backend does not declare the case (head_size 72"
    )
    assert "head size 72" in record.details[0]


def test_an_accident_in_one_form_fails(make_case: Any) -> None:
    class Impl(ReferenceImpl):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            if arguments[5] is not None:
                _left, _right = arguments[5]
            super().__init__(*arguments, **more)

    record = records(type("Wrong", (Bare,), {"get_impl_cls": staticmethod(lambda: Impl)}), make_case())["case"]
    assert record.outcome == "failed"
    assert record.summary == snapshot(
        "tried undeclared with sliding_window 9: not declared, and no clear refusal: TypeError at construct: cannot unpack non-iterable int object"
    )
    assert "sliding_window" in record.summary


def test_no_form_has_pages_of_no_token(make_case: Any) -> None:
    block_sizes = list[int]()

    class Recording(Bare):
        @classmethod
        def unsupported_reasons(cls, layer: Any, cache: Any, batch: Any) -> list[str]:
            block_sizes.append(cache.block_size)
            return ["no other page size"] if cache.block_size > 1 else []

    assert list(undeclared_forms(Recording, make_case(cache={"block_size": 1}), "cpu"))
    assert min(block_sizes) == 1


def test_a_wrong_form_is_reported_before_a_profiling_call_that_fails_and_forms_that_raise(
    plain: Callable[[str], str], make_case: Any
) -> None:
    class Impl(ReferenceImpl):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            if arguments[5] is not None:
                _left, _right = arguments[5]
            super().__init__(*arguments, **more)

        def forward(self, *args: Any, **more: Any) -> Any:
            output = super().forward(*args, **more)
            if args[5] is None:
                output.fill_(torch.nan)
            return output

        def attend(self, layer: Any, query: Any, *rest: Any) -> None:
            super().attend(layer, query * (2 if self.logits_soft_cap else 1), *rest)

    record = records(type("Wrong", (Bare,), {"get_impl_cls": staticmethod(lambda: Impl)}), make_case())["case"]
    assert plain(record.summary) == snapshot(
        "tried undeclared with logits_soft_cap 20.0: the backend does not declare the case (logits_soft_cap 20.0: feature 'logits_soft_cap' is not declared), accepts it without an error, and its output is wrong: 14 of 15 rows are wrong, the first is row 0 (request 0, position 39), in all heads; the largest error is ..."
    )
    assert "logits_soft_cap" in record.summary
    assert any("TypeError at construct" in detail for detail in record.details)
    assert plain(record.details[-1]) == snapshot(
        "forward without metadata (the profiling call) left NaN or Inf in the output"
    )
