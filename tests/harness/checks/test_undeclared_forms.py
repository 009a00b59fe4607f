"""Undeclared forms are tried one at a time, once a backend, and judged like a case of a suite."""

import pytest
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
    get_supported_dtypes = staticmethod(lambda: [torch.bfloat16])
    get_supported_head_sizes = staticmethod(lambda: [64])
    get_supported_kernel_block_sizes = staticmethod(lambda: [16])


def records(backend, *cases):
    loaded = LoadedBackend(name="mine", ref="./x.py:Mine", backend=backend, version="", origin="test")
    plan = RunPlan(cases=cases, backends=(loaded,), checks=("refusals",))
    return {record.case_id: record for record in Examiner(plan).run()}


def wrong(impl, case):
    record = records(type("Wrong", (Bare,), {"get_impl_cls": staticmethod(lambda: impl)}), case)["case"]
    assert record.outcome == "failed"
    return record


def test_every_dimension_is_tried_by_itself(make_case):
    forms = list(undeclared_forms(Bare, make_case(), "cpu"))
    tried = {form.changes for form in forms}
    assert {changes.split()[0] for changes in tried} == {
        *("dtype", "head_size", "head_size_v", "attn_type", "causal", "sliding_window", "logits_soft_cap", "alibi"),
        *("sinks", "output_quant", "kv_sharing", "layout", "block_size", "kv_cache_dtype"),
        "query_quant",
    }
    assert {"attn_type encoder", "attn_type encoder_only", "attn_type encoder_decoder"} <= tried
    for form in forms:
        assert len({reason.split(":")[0].split()[0] for reason in form.reasons}) <= 2, form


def test_declared_forms_are_not_tried(make_case):
    everything = type("All", (ReferenceBackend,), {"features": frozenset(FEATURES)})
    assert list(undeclared_forms(everything, make_case(), "cpu")) == []
    assert list(undeclared_forms(Bare, make_case(dtype="float32"), "cpu")) == []


def test_forms_are_tried_with_the_first_plain_case_and_a_right_answer_is_a_note(make_case):
    window, first, second = make_case(name="a", sliding_window=9), make_case(name="b"), make_case((1, 9), name="c")
    assert [is_plain(case) for case in (window, first, second)] == [False, True, True]
    seen = records(Bare, window, first, second)
    assert "undeclared_tried" not in {*seen["a"].figures, *seen["c"].figures}
    assert seen["b"].figures["undeclared_tried"] >= 20
    assert seen["b"].figures["declared_tried"] == 0
    assert seen["b"].outcome == "passed"
    assert seen["b"].notes == snapshot(
        (
            "tried undeclared, and answered right without declaring it: dtype float16; dtype float32; head_size 72; head_size 128; head_size 192; head_size 256; head_size 272; attn_type encoder; attn_type encoder_only; attn_type encoder_decoder; sliding_window 9; logits_soft_cap 20.0; alibi True; sinks True; causal False; output_quant OutputQuantSpec(dtype='fp8_e4m3', scale=0.005); kv_sharing True; layout HND; kv_cache_dtype fp8, k_scale 0.3, v_scale 0.07; kv_cache_dtype fp8_e5m2, k_scale 0.3, v_scale 0.07; query_quant True, kv_cache_dtype fp8, k_scale 0.3, v_scale 0.07, q_scale 1.7; kv_cache_dtype fp8, k_scale (0.3, 0.6), v_scale (0.07, 0.14); kv_cache_dtype fp8_e5m2, k_scale (0.3, 0.6), v_scale (0.07, 0.14)",
        )
    )


class AcceptsByAccident(ReferenceImpl):
    """Unpacks a window, which is one number."""

    def __init__(self, *arguments, **more):
        if arguments[5] is not None:
            _left, _right = arguments[5]
        super().__init__(*arguments, **more)


def test_an_accident_in_one_form_fails(make_case):
    assert wrong(AcceptsByAccident, make_case()).summary == snapshot(
        "tried undeclared with sliding_window 9: not declared, and no clear refusal: TypeError at construct: cannot unpack non-iterable int object"
    )


def test_no_form_has_pages_of_no_token(make_case):
    block_sizes = list[int]()

    class Recording(Bare):
        @classmethod
        def unsupported_reasons(cls, layer, cache, batch):
            block_sizes.append(cache.block_size)
            return ["no other page size"] if cache.block_size > 1 else []

    assert list(undeclared_forms(Recording, make_case(cache={"block_size": 1}), "cpu"))
    assert min(block_sizes) == 1


def test_a_wrong_form_is_reported_before_a_profiling_call_that_fails_and_forms_that_raise(plain, make_case):
    class Impl(AcceptsByAccident):
        def forward(self, *args, **more):
            output = super().forward(*args, **more)
            if args[5] is None:
                output.fill_(torch.nan)
            return output

        def attend(self, layer, query, *rest):
            super().attend(layer, query * (2 if self.logits_soft_cap else 1), *rest)

    record = wrong(Impl, make_case())
    assert plain(record.summary) == snapshot(
        "tried undeclared with logits_soft_cap 20.0: the backend does not declare the case (logits_soft_cap 20.0: feature 'logits_soft_cap' is not declared), accepts it without an error, and its output is wrong: 14 of 15 rows are wrong, the first is row 0 (request 0, position 39), in all heads; the largest error is ..."
    )
    assert any("TypeError at construct" in detail for detail in record.details)
    assert record.details[-1] == snapshot("forward without metadata (the profiling call) left NaN or Inf in the output")


# Declared forms: sizes that few kernels divide evenly, and scales of heads.


def only_multiples_of(size, name):
    """An impl that raises for other head sizes, or reads the first scale alone."""

    class Impl(ReferenceImpl):
        def __init__(self, *arguments, **more):
            if name == "head_size" and arguments[1] % size:
                raise ValueError(f"head size {arguments[1]} is no multiple of {size}")
            super().__init__(*arguments, **more)

        def forward(self, layer, query, key, value, kv_cache, *rest, **more):
            scales = layer._k_scale, layer._v_scale
            if name == "block_size" and kv_cache.numel() and kv_cache.shape[2] % size:
                raise NotImplementedError(f"pages of {kv_cache.shape[2]}")
            if name == "fp8_per_head" and layer._k_scale.numel() > 1:
                layer._k_scale, layer._v_scale = (scale.flatten()[:1].expand_as(scale) for scale in scales)
            made = super().forward(layer, query, key, value, kv_cache, *rest, **more)
            layer._k_scale, layer._v_scale = scales
            return made

    return Impl


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("head_size", 8, "tried with head_size 68: declared, but refused at construct: ValueError: head size 68 is"),
        ("block_size", 16, "tried with block_size 24: declared, but refused at forward: NotImplementedError: pages of"),
        (
            "fp8_per_head",
            1,
            "tried with kv_cache_dtype fp8, k_scale (0.3, 0.6), v_scale (0.07, 0.14): the backend decl",
        ),
        ("nothing", 1, ""),
    ],
)
def test_a_declared_form_must_run(make_case, name, size, words):
    impl = only_multiples_of(size, name)
    members = {"get_impl_cls": staticmethod(lambda: impl)}
    record = records(type("Strict", (ReferenceBackend,), members), make_case())["case"]
    assert record.outcome == ("failed" if words else "passed")
    assert words == "" or record.summary.startswith(words)
    assert words or record.figures["declared_tried"] == 4


def test_a_form_that_is_not_excluded_names_the_declaration_that_excludes_it(make_case):
    def meaning(name, size, **members):
        impl = only_multiples_of(size, name)
        members["get_impl_cls"] = staticmethod(lambda: impl)
        return records(type("Strict", (ReferenceBackend,), members), make_case())["case"].meaning

    assert meaning("head_size", 8) == snapshot(
        "the refusal is clear, but no head size is excluded: list those that run in get_supported_head_sizes (of a function: supported_head_sizes)"
    )
    listed = {"get_supported_head_sizes": staticmethod(lambda: [64, 68])}
    assert meaning("head_size", 8, **listed) == snapshot(
        "the refusal is clear, but head_size 68 is listed: list those that run in get_supported_head_sizes (of a function: supported_head_sizes)"
    )
    assert meaning("block_size", 16) == snapshot(
        "the refusal is clear, but block_size 24 is among the declared multiples of 1: list those that run in get_supported_kernel_block_sizes (of a function: supported_block_sizes)"
    )
