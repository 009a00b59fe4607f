"""A step of several sessions: what is built when, which metadata a layer gets, and who is named where one raises."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attncheck.backends.candidates.reference import ReferenceBackend, ReferenceBuilder, ReferenceImpl
from attncheck.harness.driver.foreign_code import StageError
from attncheck.harness.driver.session import OtherLayer, Session, run_step
from attncheck.harness.problem.problem import build_problem

CPU = torch.device("cpu")


def backend_of(impl=ReferenceImpl, builder=ReferenceBuilder):
    made = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type("Tried", (ReferenceBackend,), made)


@pytest.fixture
def events():
    return []


@pytest.fixture
def watched(events):
    """A backend that notes what is built and which layer runs over which metadata."""

    class Builder(ReferenceBuilder):
        def build(self, *arguments, **keywords):
            made = super().build(*arguments, **keywords)
            events.append(("build", made))
            return made

    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            events.append((self.kv_sharing_target_layer_name or "forward", arguments[5]))
            super().attend(*arguments)

    return backend_of(Impl, Builder)


@pytest.fixture
def problem(make_case):
    return build_problem(make_case((1, 37), (5, 40)), 0)


def twin(problem, *, shares_cache=False):
    other = replace(problem, keys=-problem.keys, values=-problem.values)
    return OtherLayer(other, "the twin", shares_cache=shares_cache)


def test_layers_of_a_group_share_what_was_built_once(problem, watched, events):
    session = Session(watched, problem, CPU, layers=(twin(problem),))
    run_step([*session.layers, session])
    assert [name for name, _ in events] == ["build", "forward", "forward"]
    assert len({id(metadata) for _, metadata in events}) == 1


def test_a_layer_that_shares_a_cache_is_handed_keys_and_reads_the_other_s(problem, watched, events):
    session = Session(watched, problem, CPU, layers=(twin(problem, shares_cache=True),))
    own, shared = run_step([session, *session.layers])
    assert [name for name, _ in events] == ["build", "forward", "layer.1"]
    assert torch.equal(own.output, shared.output)


def test_micro_batches_are_built_before_the_first_one_runs(problem, make_case, watched, events):
    other = build_problem(make_case((3, 20), (2, 9), name="other"), 0)
    session = Session(watched, problem, CPU, (other,))
    run_step([session, session.with_second_builder(other, "the other micro-batch")])
    assert [name for name, _ in events] == ["build", "build", "forward", "forward"]
    metadata = [made for _, made in events]
    assert metadata[:2] == metadata[2:]
    assert metadata[0] is not metadata[1]


@pytest.mark.parametrize("number", range(2))
def test_a_builder_gets_all_layers_of_its_group(problem, number):
    """The case's own layer is the first of the group in half of the cases, and the last in the others."""
    case = problem.case
    named = (replace(case, layer=replace(case.layer, scale=1 + n / 8)) for n in range(16))
    chosen = next(one for one in named if int(one.hash, 16) % 2 == number)
    own = build_problem(chosen, 0)
    session = Session(ReferenceBackend, own, CPU, layers=(twin(own), twin(own)))
    known = session.builder.vllm_config.compilation_config.static_forward_context
    names = ["layer.1", "layer.2", "layer.3"]
    assert session.builder.layer_names == (names[::-1] if number else names)
    assert [known[name].impl for name in names] == [session.impl, *(layer.impl for layer in session.layers)]


def test_the_layer_that_raises_is_named(problem):
    calls = []

    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            calls.append(None)
            if len(calls) == 2:
                raise RuntimeError("no workspace")
            super().attend(*arguments)

    session = Session(backend_of(Impl), problem, CPU, layers=(twin(problem),))
    with pytest.raises(StageError) as caught:
        run_step([session, *session.layers])
    assert caught.value.raised.stage == "forward of the twin"


def test_what_a_layer_changes_in_the_metadata_is_named(problem):
    class Impl(ReferenceImpl):
        def attend(self, *arguments):
            super().attend(*arguments)
            metadata = arguments[5]
            metadata.common.seq_lens -= 1
            metadata.plan = {"splits": 2}
            metadata.equal, metadata.parts, metadata.array = [torch.ones(2)], [torch.zeros(2)], np.zeros(2)

    class Builder(ReferenceBuilder):
        def build(self, *args, **keywords):
            metadata = super().build(*args, **keywords)
            metadata.equal, metadata.parts, metadata.array = [torch.ones(2)], [torch.ones(2)], np.ones(2)
            return metadata

    changes = []
    run_step([Session(backend_of(Impl, Builder), problem, CPU)], changes)
    assert changes == [
        "forward of the layer changes metadata.common.seq_lens",
        "forward of the layer changes metadata.parts",
        "forward of the layer changes metadata.array",
        "forward of the layer changes metadata.plan",
    ]
    unchanged = []
    run_step([Session(ReferenceBackend, problem, CPU)], unchanged)
    assert unchanged == []
