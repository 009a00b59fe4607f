"""What a wrong answer looks like: faults are named, together with the rows they show in, and nothing else is."""

from dataclasses import replace

import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceImpl
from attncheck.cases.loader import load_suite
from attncheck.harness.diagnosis.explain import ZEROS, Misfit, best_fit, explain, known_faults
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.harness.truth.unpaged import share_of_budget
from attncheck.reference import Precision
from attncheck.reports.run_file.causes import ALTERNATIVE, EVIDENCE, likely_causes

CPU = torch.device("cpu")
BATCH = (1, 130), (33, 200), (1, 61), (20, 20)
"""Rows 0 and 34 decode, rows 1 to 33 extend, rows 35 to 54 are a whole prompt."""

DECODES = "the 2 wrong rows, all with query_len 1"
FITS, FITS_LSE = EVIDENCE.format("output"), EVIDENCE.format("LSE")


def where(rows, heads=slice(None), **changes):
    """``attend`` that answers another question in some rows and heads, as a kernel chosen by length would."""

    def attend(self, *args):
        ReferenceImpl.attend(self, *args)
        output, output_lse = args[6].clone(), args[7].clone()
        honest = self.params
        self.params = lambda metadata: replace(honest(metadata), **changes)
        ReferenceImpl.attend(self, *args[:6], output, output_lse)
        del self.params
        for got, wrong in ((args[6], output), (args[7], output_lse)):
            chosen = got[rows]
            chosen[:, heads] = wrong[rows][:, heads]
            got[rows] = chosen

    return attend


@pytest.fixture
def meaning(finding_of):
    """The first cause of a wrong backend, and the rows that fit."""

    def found(attend, case, check="numerics"):
        finding = finding_of(case, check, attend=attend)
        return str(finding.meaning).partition(ALTERNATIVE)[0]

    return found


@pytest.mark.parametrize("every", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_a_question_with_the_right_answer_explains_nothing(every):
    """Wherever a hypothesis equals the truth, an output that is merely imprecise must not be blamed on it."""
    met = 0
    for case in load_suite("smoke").cases[::every]:
        problem = build_problem(case, 0)
        truth = truth_of(problem, CPU)
        vacuous = {
            hypothesis.meaning
            for hypothesis in known_faults(problem, truth)
            if bool((share_of_budget(hypothesis.compute()[0] - truth.out, truth.budget) < 0.1).all())
        }
        if not vacuous:
            continue
        met += 1
        shape = truth.out.shape
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        worst = share_of_budget(noise, truth.budget).nan_to_num(posinf=0.0).amax()
        output = truth.out + noise * 1.3 / worst
        explanation = explain(problem, truth, output, share_of_budget(output - truth.out, truth.budget))
        assert not vacuous.intersection(likely_causes(explanation)), (case.id, explanation)
    assert met > 1


@pytest.mark.parametrize(
    ("rows", "heads", "which"),
    [
        (slice(None), slice(None), "all rows"),
        ([0, 34], slice(None), DECODES),
        ([0], slice(None), "the one wrong row, of request 0"),
        (slice(1, 34), slice(None), "the 33 wrong rows, all with query_len > 1 and context"),
        (slice(None), slice(4, 8), ", only heads 4 to 7 (those of KV head 1)"),
        (slice(None), slice(3, 4), ", only head 3"),
    ],
)
def test_the_rows_that_fit_are_named(make_case, meaning, rows, heads, which):
    explanation = meaning(where(rows, heads, logits_soft_cap=None), make_case(*BATCH, logits_soft_cap=5.0))
    assert explanation.startswith(f"the soft cap is ignored{FITS} ")
    assert explanation.endswith(which)


def test_faults_that_leave_zeros_are_not_named_beside_the_zeros(ask):
    problem, _ = ask(*BATCH)
    wrong = torch.full((len(problem.query), problem.layer.num_heads), 50.0, dtype=torch.float64)
    exact = torch.zeros_like(wrong)
    faults = [Misfit(name, exact, wrong, exact) for name in ("no key is read", ZEROS, "the values are lost")]
    assert (best_fit(problem, faults, wrong) or "").startswith(ZEROS)
    assert len(likely_causes(best_fit(problem, faults, wrong))) == 1
    assert len(likely_causes(best_fit(problem, [faults[0], faults[2]], wrong))) == 2


def test_rows_without_context_share_just_that(make_case, meaning):
    batch = (1, 90), (25, 25), (14, 60), (18, 18), (1, 45)
    attend = where([*range(1, 26), *range(40, 58)], logits_soft_cap=None)
    assert meaning(attend, make_case(*batch, logits_soft_cap=5.0)).endswith("wrong rows, all without context")


def test_a_window_ignored_on_both_sides_is_one_fault(make_case, meaning):
    case = make_case((40, 40), (30, 30), sliding_window=8, attn_type="encoder_only")
    found = meaning(where(slice(None), window=(-1, -1)), case)
    assert found == f"the window is ignored on both sides{FITS} all rows"


def test_a_common_factor_is_named(ask):
    asked = ask(*BATCH)
    output = asked.truth.out.clone()
    output[1:34] *= 0.9
    which = "the 33 wrong rows, all with query_len > 1 and context"
    assert asked.explained(output) == f"the output is the right one times 0.9{FITS} {which}"


def ten_bits(x):
    """As TF32 rounds."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


FLOAT32 = Precision(torch.float32)


@pytest.mark.parametrize(
    ("dtype", "rounded", "parts", "coarse", "imprecision"),
    [
        ("float32", ten_bits, ("query", "keys"), FLOAT32, "products of query and key in TF32 or float16"),
        ("float32", torch.Tensor.half, ("query", "keys", "values"), FLOAT32, "inputs rounded to TF32 or float16"),
        ("float16", None, (), Precision(torch.float32, torch.bfloat16), "softmax weights rounded to bfloat16"),
        (
            "float16",
            torch.Tensor.bfloat16,
            ("query", "keys", "values"),
            Precision.kernel(torch.bfloat16),
            "arithmetic in bfloat16",
        ),
        ("bfloat16", None, (), Precision(*3 * (torch.bfloat16,)), "scores and sums kept in bfloat16"),
    ],
)
def test_coarse_arithmetic_is_recognised_by_the_size_of_its_error(ask, dtype, rounded, parts, coarse, imprecision):
    asked = ask(*BATCH, dtype=dtype)
    problem, truth = asked
    rows = replace(truth.rows, **{part: rounded(getattr(truth.rows, part)).to(problem.dtype) for part in parts})
    out, _ = rows.attend(truth.params, coarse)
    likely = f"the precision is too low: the error has the size of that with {imprecision}, for example"
    assert asked.explained(out.double()) == likely


def test_an_error_of_another_size_is_no_imprecision(ask):
    asked = ask(*BATCH)
    out = asked.truth.out
    noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert likely_causes(asked.explained(out + noise)) == ()


def test_not_a_number_is_explained_by_its_place(ask):
    asked = ask((5, 3), (1, 20))
    truth = asked.truth
    output = truth.out.clone()
    output[:2] = float("nan")
    assert asked.explained(output) == (
        "NaN or Inf in rows that see nothing, and in no others: 0 divided by 0; they must be 0"
    )
    output[3] = float("nan")
    assert asked.explained(output) == (
        "NaN or Inf in the output. Possible causes: NaN that the output held before the call; scores that overflow; "
        "a tile of keys in which a row sees nothing (-inf minus -inf)"
    )
    output = truth.out.clone()
    output[3] = float("inf")
    assert asked.explained(output) == "Inf in the output, and no NaN: something overflows"
    output = truth.out.clone()
    output[1] = 1.0
    assert asked.explained(output) == "a row that sees nothing must be 0"
    padded = ask((1, 20), padding=(0, 2))
    assert "or a padding row of the inputs" in padded.explained(padded.truth.out * float("nan"))


def lse_without_sinks(self, *args):
    """Leave the sinks out of the LSE alone."""
    where(slice(None), sinks=None)(self, *args)
    lse = args[7].clone()
    ReferenceImpl.attend(self, *args)
    args[7].copy_(lse)


def partly_to_base_two(self, *args):
    ReferenceImpl.attend(self, *args)
    args[7][[0, 34]] /= torch.tensor(2.0).log()


def lse_in_bfloat16(self, *args):
    ReferenceImpl.attend(self, *args)
    args[7].copy_(args[7].bfloat16())


@pytest.mark.parametrize(
    ("attend", "layer", "cause"),
    [
        (lse_without_sinks, {"sinks": True}, f"the sinks are in the output but not in the LSE{FITS_LSE} all rows"),
        (where(slice(None), sinks=None), {"sinks": True}, f"the sinks are ignored{FITS_LSE} all rows"),
        (
            partly_to_base_two,
            {},
            f"the logarithm is to base 2 (declare lse_base, or multiply by ln 2){FITS_LSE} {DECODES}",
        ),
        (
            lse_in_bfloat16,
            {},
            "the precision is too low: the error has the size of that with scores and sums kept in bfloat16, for example",
        ),
    ],
)
def test_what_is_wrong_with_an_lse_is_named(make_case, meaning, attend, layer, cause):
    assert meaning(attend, make_case(*BATCH, **layer), "lse") == cause
