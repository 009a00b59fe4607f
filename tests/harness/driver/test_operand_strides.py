"""Operands in other memory: the same values, each form with the strides that it is named for."""

from dataclasses import replace
from typing import get_args

import pytest
import torch

from attncheck.harness.driver.outputs import GuardedBuffer
from attncheck.harness.driver.step import make_step, operand_views
from attncheck.harness.problem.problem import build_problem
from attncheck.reference.spec import StrideForm, StridesSpec

CPU = torch.device("cpu")


def rows(count=5, heads=3, size=4):
    return torch.arange(count * heads * size, dtype=torch.float32).view(count, heads, size)


@pytest.mark.parametrize(
    ("form", "heads", "strides"),
    [
        ("contiguous", 3, (12, 4, 1, False)),
        ("padded", 3, (28, 4, 1, False)),
        ("offset", 3, (12, 4, 1, True)),
        ("transposed", 3, (4, 20, 1, True)),
        ("odd", 1, (4, 7, 1, True)),
    ],
)
def test_each_form_holds_the_values_with_the_strides_it_is_named_for(form, heads, strides):
    given = rows(heads=heads)
    view, *_ = operand_views([given] * 3, StridesSpec(query=form, key="contiguous", value="contiguous"))
    assert torch.equal(view, given)
    assert (*view.stride(), view.storage_offset() > 0) == strides
    if form == "padded":
        whole = view.as_strided((5, 28), (28, 1))
        assert bool(torch.isnan(whole[:, 12:]).all())  # room between rows is no number


def test_fused_operands_share_memory_and_others_do_not():
    given = rows(), rows() + 100, rows() + 200
    views = operand_views(given, StridesSpec(query="fused", key="transposed", value="fused"))
    assert all(torch.equal(view, own) for view, own in zip(views, given, strict=True))
    query, key, value = [each.untyped_storage().data_ptr() for each in views]
    assert query == value != key


@pytest.mark.parametrize("form", get_args(StrideForm))
def test_writes_beside_the_rows_of_a_buffer_are_found_in_any_form(form):
    for shape in ((5, 3, 4), (5, 3)):
        buffer = GuardedBuffer(shape, 4, torch.float32, CPU, form)
        assert bool(buffer.unwritten_rows()[:4].all())
        assert not buffer.touched()
        buffer.handed_out()[:] = 2.0
        assert buffer.touched()
        assert not bool(buffer.unwritten_rows().any())
        assert not buffer.breached()
        behind = buffer.rows.as_strided(
            shape, buffer.rows.stride(), buffer.rows.storage_offset() + buffer.rows.stride(0)
        )
        behind[:] = 2.0
        assert buffer.breached()


def test_what_lies_between_padded_rows_is_guarded():
    buffer = GuardedBuffer((5, 3, 4), 5, torch.float32, CPU, "padded")
    out = buffer.rows
    out.as_strided((5,), (out.stride(0),), out.storage_offset() + 12).fill_(9.0)
    assert buffer.breached()


def test_a_step_takes_the_strides_of_its_case_before_what_its_inputs_plant(make_case):
    problem = build_problem(make_case(), 0)
    fused = make_step(problem, CPU)
    assert fused.query.stride(0) == (8 + 2 + 2) * 64 + 16
    strided = replace(problem, case=replace(problem.case, strides=StridesSpec(query="transposed", output="padded")))
    step = make_step(strided, CPU)
    assert step.query.stride() == (64, 40 * 64, 1)
    assert step.output_form == "padded"
    assert torch.equal(step.query, fused.query)
