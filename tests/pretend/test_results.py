"""Results of a step on an accelerator: they are those at its end, and small ones are judged on the host."""

from dataclasses import replace

import pytest
import torch
from made_cases import make_case

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.backends.registry import LoadedBackend
from attncheck.harness.checks.findings import Broken
from attncheck.harness.checks.interface import CheckedCase, SharedByChecks
from attncheck.harness.checks.refusals import check_features
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.session import OtherLayer, Session, run_step
from attncheck.harness.problem import sizes
from attncheck.harness.problem.problem import build_problem
from attncheck.harness.truth.truth import truth_of
from attncheck.reference.step_spec import MicroBatchOptions, SplitKVOptions

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")


def backend_of(late):
    """Return the reference that calls ``late(earlier, own)`` after each call, with output and LSE of both calls."""

    class Impl(ReferenceImpl):
        earlier = None

        def forward(self, *args, output, output_lse, **more):
            super().forward(*args, output=output, output_lse=output_lse, **more)
            own = output, output_lse
            if Impl.earlier is not None:
                late(Impl.earlier, own)
            Impl.earlier = own
            return output

    return type("Late", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})


def beyond(output):
    return output.as_strided((1, *output.shape[1:]), output.stride(), output.storage_offset() + output.numel())


def overwrite(earlier, _own):
    earlier[0][0] = 5.0


def overwrite_lse(earlier, _own):
    earlier[1][0] = 5.0


def overwrite_guards(earlier, _own):
    beyond(earlier[0]).zero_()
    beyond(earlier[1]).zero_()


def seen_of(case, late, place):
    """Return the observation of a step, beside that of the reference."""
    problem = build_problem(case, 0)
    return (Session(backend, problem, place).run() for backend in (backend_of(late), ReferenceBackend))


MICRO = {"path": "micro_batch", "options": MicroBatchOptions(cuts=(3,))}
PLACES = pytest.mark.parametrize("place", [CPU, CUDA], ids=str)


@PLACES
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(MICRO, id="micro-batches"),
        pytest.param({"path": "split_kv", "options": SplitKVOptions(parts=2)}, id="parts of keys"),
    ],
)
def test_what_a_later_call_writes_to_the_result_of_an_earlier_one_is_seen(device, place, fields):
    case = make_case((2, 40), (5, 60), **fields)
    seen, right = seen_of(case, overwrite, place)
    assert not torch.equal(seen.output, right.output)
    seen, right = seen_of(case, overwrite_lse, place)
    assert not torch.equal(seen.lse, right.lse)
    seen, right = seen_of(case, overwrite_guards, place)
    assert (seen.breaches, right.breaches) == (("output", "LSE"), ())
    assert torch.equal(seen.output, right.output)


@PLACES
def test_what_a_later_layer_writes_to_the_result_of_an_earlier_one_is_seen(device, place):
    problem = build_problem(make_case((2, 40), (5, 60)), 0)
    other = OtherLayer(replace(problem, keys=-problem.keys), "the other layer")
    session = Session(backend_of(overwrite), problem, place, layers=(other,))
    first, last = run_step([session, *session.layers])
    assert bool((first.output[0] == 5.0).all())
    assert not bool((last.output[0] == 5.0).any())


@PLACES
def test_rows_that_only_a_later_call_writes_count_as_unwritten(device, place):
    """In a model, the result of a call is read before the next call."""

    class Impl(ReferenceImpl):
        due = ()

        def forward(self, *args, output, output_lse, **more):
            made = output.clone(), output_lse.clone()
            super().forward(*args, output=made[0], output_lse=made[1], **more)
            for late, rows in Impl.due:
                late[0] = rows[0]
            Impl.due = tuple(zip((output, output_lse), made, strict=True))
            for own, rows in Impl.due:
                own[1:] = rows[1:]
            return output

    backend = type("Late", (ReferenceBackend,), {"get_impl_cls": staticmethod(lambda: Impl)})
    seen = Session(backend, build_problem(make_case((2, 40), (5, 60), **MICRO), 0), place).run()
    assert seen.unwritten.nonzero().flatten().tolist() == [0, 3]
    assert seen.lse_unwritten.nonzero().flatten().tolist() == [0, 3]
    assert torch.isnan(seen.output).flatten(1).any(dim=1).nonzero().flatten().tolist() == [3]


@PLACES
def test_a_result_that_a_later_call_frees_is_an_error_of_the_backend(device, place):
    backend = backend_of(lambda earlier, _own: earlier[0].untyped_storage().resize_(0))
    session = Session(backend, build_problem(make_case((2, 40), (5, 60), **MICRO), 0), place)
    with pytest.raises(StageError) as failure:
        session.run()
    assert failure.value.raised.error_type == "ResizedStorage"


@pytest.mark.parametrize("judged", ["both on the GPU", "one on the host"])
def test_another_layer_with_the_output_of_the_first_is_found_wherever_each_is_judged(device, monkeypatch, judged):
    """Without the causal rule, a layer has more operations."""

    class Builder(ReferenceBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = replace(common_attn_metadata, causal=True)
            return super().build(common_prefix_len, common, fast_build)

    backend = type("Causal", (ReferenceBackend,), {"get_builder_cls": staticmethod(lambda: Builder)})
    cases = (make_case((9, number)) for number in range(9, 40))
    case = next(case for case in cases if int(case.hash, 16) % 3 == 2)
    num_operations = sizes.operations(case, 2)
    monkeypatch.setattr(sizes, "_SMALL", num_operations if judged == "one on the host" else 0)
    problem = build_problem(case, 0)
    loaded = LoadedBackend(name="causal", ref="./x.py:X", backend=backend, version="", origin="test")
    truth = truth_of(problem, CUDA)
    assert truth.out.device.type == ("cpu" if judged == "one on the host" else "cuda")
    finding = check_features(CheckedCase(loaded, problem, truth, CUDA, (), SharedByChecks()))
    assert isinstance(finding, Broken)
    assert "causal of the layer is ignored" in finding.meaning
    assert finding.details[0] == "it has the output of the first layer"
