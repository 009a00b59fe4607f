"""Functions through the evaluation of a case: what is not offered, what raises, what comes back in the wrong form."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot

from attncheck.backends.candidates.reference import ReferenceBackend
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.problem.sizes import needed_bytes
from attncheck.harness.run.evaluate import Examiner, RunPlan
from attncheck.reference import causal_conv1d, merge_attn_states
from attncheck.reference.spec import DEFAULT_CHECKS
from attncheck.reports.run_file.records import Record

ALL = DEFAULT_CHECKS
# The checks that do not apply to a function without an LSE.
NOT_APPLICABLE = dict.fromkeys(("lse", "features", "determinism", "invariance", "builder", "cudagraph"), "unsupported")


def offering(**functions: Callable[..., Any]) -> Any:
    return type("Mine", (ReferenceBackend,), {"functions": staticmethod(lambda: functions)})


def examine(backend: Any, case: Any, **plan: Any) -> dict[str, Record]:
    loaded = LoadedBackend(name="mine", ref="./x.py:Mine", backend=backend, version="", origin="test")
    examiner = Examiner(RunPlan(cases=(case,), backends=(loaded,), **plan))
    records = {record.check: record for record in examiner.run()}
    assert examiner.blind == []
    return records


def emptied(tensor: Any) -> Any:
    tensor.untyped_storage().resize_(0)
    return tensor


def outcomes(records: dict[str, Record]) -> dict[str, str]:
    return {check: record.outcome for check, record in records.items()}


def summary_of(record: Record) -> str:
    assert record.outcome == "failed"
    return record.summary


def test_a_backend_without_functions_is_not_examined_and_the_reason_is_stated(merge_case: Any, conv_case: Any) -> None:
    for case, name in ((merge_case(), "merge_attn_states"), (conv_case(), "causal_conv1d")):
        for record in examine(offering(), case).values():
            assert record.outcome == "unsupported"
            assert (record.reasons, record.by) == ((f"functions() offers no {name}",), "backend")


def test_what_the_backend_does_not_declare_is_the_reason(merge_case: Any) -> None:
    mine = offering(merge_attn_states=merge_attn_states)
    mine.get_supported_dtypes = staticmethod(lambda: [torch.float16])
    records = examine(mine, merge_case(dtype="float32"))
    assert set(outcomes(records).values()) == {"unsupported"}
    record = records["refusals"]
    assert record.outcome == "unsupported"
    assert record.reasons == snapshot(("dtype float32: supported are float16",))


def test_a_list_of_functions_that_raises_is_errored(merge_case: Any) -> None:
    mine = type("Mine", (ReferenceBackend,), {"functions": staticmethod(lambda: 1 / 0)})
    records = examine(mine, merge_case())
    assert outcomes(records) == dict.fromkeys(ALL, "errored")
    record = records["numerics"]
    assert record.outcome == "errored"
    assert record.stage == "functions"


def test_an_exception_breaks_the_claim_and_names_the_function(conv_case: Any) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("line")

    records = examine(offering(causal_conv1d=broken), conv_case())
    assert outcomes(records) == dict.fromkeys(ALL, "errored") | NOT_APPLICABLE | {"refusals": "failed"}
    assert summary_of(records["refusals"]) == snapshot("declared, but raised at causal_conv1d: KeyError: 'line'")
    record = records["numerics"]
    assert record.outcome == "errored"
    assert record.traceback.count("File ") == 1  # that of the function, and none of the harness


@pytest.mark.parametrize(
    ("merge", "complaint"),
    [
        (lambda a, x, b, y: a, "merge_attn_states returned a Tensor; the contract requires a pair (out, lse)"),
        (lambda a, x, b, y: (None, x), "the output is None, not a torch.Tensor"),
        (
            lambda a, x, b, y: (emptied(a.clone()), x),
            "the output is a tensor whose storage was resized: it holds too few bytes",
        ),
        (lambda a, x, b, y: (a, (x + y).t()), "the LSE has shape (8, 5), expected (5, 8)"),
        (
            lambda a, x, b, y: (a, x.half()),
            "the LSE has dtype float16, expected float32 or float64",
        ),
        (
            lambda a, x, b, y: (a.half(), x),
            "the output has dtype float16, expected bfloat16, float32 or float64",
        ),
    ],
)
def test_an_answer_of_another_form_is_wrong(merge_case: Any, merge: Callable[..., Any], complaint: str) -> None:
    records = examine(offering(merge_attn_states=merge), merge_case((5, 40)))
    assert summary_of(records["numerics"]) == complaint
    assert summary_of(records["lse"]) == complaint
    assert records["refusals"].outcome == "passed"


def test_changed_arguments_are_named_though_the_answer_is_right(merge_case: Any, conv_case: Any) -> None:
    def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        answer = merge_attn_states(out_a, lse_a, out_b, lse_b)
        lse_a[0] += 1
        out_b.untyped_storage().fill_(0)
        return answer

    def convolve(x: Any, *rest: Any, **options: Any) -> Any:
        y = causal_conv1d(x, *rest, **options)
        rest[-1].logical_not_()
        x.as_strided((1,), (1,), x.shape[1]).zero_()  # in memory behind the first row of the view
        return y

    merged = examine(offering(merge_attn_states=merge), merge_case())
    assert summary_of(merged["numerics"]) == snapshot("arguments were changed: lse_a, out_b")
    convolved = examine(offering(causal_conv1d=convolve), conv_case())
    assert summary_of(convolved["numerics"]) == snapshot("arguments were changed: x, has_initial_state")


def test_rubbish_is_only_nan_where_nan_is_declared_to_be_safe(merge_case: Any) -> None:
    def multiply(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        a, b = (out.masked_fill(out.isinf(), torch.nan) for out in (out_a, out_b))
        out, lse = merge_attn_states(a, lse_a, b, lse_b)
        return out + (a + b).isnan().any() * torch.nan if bool((a + b).isnan().any()) else out, lse

    careful = offering(merge_attn_states=multiply)
    careful.features = ReferenceBackend.features - {"merge_nan"}
    assert examine(careful, merge_case())["containment"].outcome == "passed"
    careless = offering(merge_attn_states=multiply)
    records = examine(careless, merge_case())
    where = "reaches 40 of 40 rows, the first is row 0 (request 0, position 36)"
    assert summary_of(records["containment"]) == f"NaN instead of 3072 behind an LSE of -inf {where}"


def test_a_merge_that_does_not_repeat_itself_is_held_to_the_budget(merge_case: Any) -> None:
    calls: list[int] = []

    def merge(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> Any:
        calls.append(1)
        out, lse = merge_attn_states(out_a, lse_a, out_b, lse_b)
        return out * (1 + 1e-6 * len(calls)), lse

    record = examine(offering(merge_attn_states=merge), merge_case())["containment"]
    assert record.outcome == "passed"
    assert record.notes == snapshot(("compared within the allowed error: equal input gives different bits",))


def test_what_does_not_fit_is_unavailable_before_anything_is_made(conv_case: Any, merge_case: Any) -> None:
    for case, function in (
        (conv_case((10**6, 10**6), options={"channels": 10**6}), causal_conv1d),
        (merge_case((10**6, 10**6), num_heads=1024), merge_attn_states),
    ):
        records = examine(offering(**{function.__name__: function}), case)
        assert set(outcomes(records).values()) == {"unavailable"}
    assert needed_bytes(merge_case((1, 10**6))) < 2**20  # context is only a number


def test_a_wrong_convolution_is_reported_in_rows(plain: Callable[[str], str], conv_case: Any) -> None:
    def convolve(x: Any, *rest: Any, **options: Any) -> Any:
        y = causal_conv1d(x, *rest, **options)
        y[7] *= 1.05
        y[9] = torch.nan
        return y

    records = examine(offering(causal_conv1d=convolve), conv_case((6, 9), (6, 20)))
    assert plain(summary_of(records["numerics"])) == snapshot(
        "wrong in 2 of 12 rows, the first is row 7 (request 1, position 15); the largest error is ..."
    )
    assert outcomes(records)["cache_write"] == "passed"


def test_rows_of_padding_are_the_functions_own(conv_case: Any) -> None:
    def convolve(x: Any, weight: Any, bias: Any, states: Any, starts: Any, *rest: Any, **options: Any) -> Any:
        y = causal_conv1d(x, weight, bias, states, starts, *rest, **options)
        y[10:] = torch.nan
        return y

    records = examine(offering(causal_conv1d=convolve), conv_case((10, 12), padding=(1, 3)))
    assert outcomes(records) == dict.fromkeys(ALL, "passed") | NOT_APPLICABLE


def test_a_failure_is_dumped_with_the_tensors_of_its_question(merge_case: Any, tmp_path: Path) -> None:
    mine = offering(merge_attn_states=lambda a, x, b, y: (a, x))
    examine(mine, merge_case((5, 40)), dump=tmp_path)
    (file,) = tmp_path.iterdir()
    content = torch.load(file, weights_only=True)
    assert content["case"] == "made/case"
    assert content["out_b"].shape == (5, 8, 64)
    assert content["truth"].dtype == torch.float64
    assert {"lse_a", "lse_b", "truth_lse", "budget_norm", "budget_lse"} <= set(content)
    again, _ = merge_attn_states(*(content[name] for name in ("out_a", "lse_a", "out_b", "lse_b")))
    assert torch.equal(again, content["truth"])
