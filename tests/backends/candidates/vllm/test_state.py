"""vLLM's classes for layers with a state, where vLLM is a stand-in of a few modules. tests/vllm has the real one."""

from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest
import torch

from attncheck.backends.candidates.vllm import package
from attncheck.backends.candidates.vllm.state import StateSpaceBackend, StateSpaceBuilder, state_space_backend
from attncheck.backends.candidates.vllm.state_layers import GatedDeltaNet, _convolution, _transposed
from attncheck.backends.declarations import undeclared
from attncheck.backends.state import StateSpec
from attncheck.cases.loader import load_suite
from attncheck.harness.driver.recurrent import common_metadata
from attncheck.harness.problem.recurrent import build_recurrent

CASES = {case.id: case for case in load_suite("state").cases}


@dataclass
class Common:
    """The fields of vLLM's common metadata that its builders of states read."""

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    is_prefilling: torch.Tensor
    block_table_tensor: torch.Tensor
    num_reqs: int
    num_actual_tokens: int


@pytest.fixture
def platform(monkeypatch):
    """A vLLM built for a CPU."""
    here = SimpleNamespace(device_type="cpu", is_cpu=lambda: True)
    monkeypatch.setattr(package, "platform", lambda: here)
    monkeypatch.setattr(package, "version", lambda: "9.9")

    def pack(module, remove_weight):
        module.weight.data = module.weight.data + 1

    monkeypatch.setattr(package, "module", lambda name: SimpleNamespace(dispatch_cpu_unquantized_gemm=pack))
    return here


def built(case_id, *, accepted):
    """What vLLM's builder gets for the step of a case: the common metadata and the keywords."""
    problem = build_recurrent(CASES[case_id], 0)
    common = common_metadata(problem, torch.device("cpu"))
    builder = object.__new__(StateSpaceBuilder)
    builder.theirs = SimpleNamespace(build=lambda prefix, metadata, **keywords: (metadata, keywords))
    builder.device, builder._metadata_cls = torch.device("cpu"), Common
    builder._num_drafts = problem.options.num_speculative_tokens
    builder._positions = torch.zeros(1, dtype=torch.int64)
    builder.kv_cache_spec = StateSpec(
        shapes=((4, 16, 32),),
        dtypes=(torch.float32,),
        mamba_type="gdn",
        block_size=16,
        num_speculative_blocks=builder._num_drafts,
    )
    counts = torch.arange(1, common.num_reqs + 1, dtype=torch.int32) if accepted else None
    return problem, builder.build(0, common, num_accepted_tokens=counts)


def test_a_step_has_no_padding_requests_and_the_slots_of_its_requests():
    problem, (metadata, keywords) = built("gdn-mixed.bfloat16-float32", accepted=False)
    lengths = [request.num_rows for request in problem.requests]
    assert (metadata.num_reqs, metadata.num_actual_tokens) == (len(lengths), sum(lengths))
    assert metadata.query_start_loc.diff().tolist() == lengths
    assert metadata.block_table_tensor.tolist() == [[request.slots[0]] for request in problem.requests]
    assert metadata.block_table_tensor.stride() == (1, 1)
    assert metadata.is_prefilling.tolist() == [not request.is_decode for request in problem.requests]
    assert keywords == {}


def test_requests_that_verify_drafts_have_their_number_and_others_have_minus_one():
    problem, (metadata, keywords) = built("gdn-drafts.float32", accepted=True)
    assert metadata.block_table_tensor.tolist() == [list(request.slots) for request in problem.requests]
    drafts = [request.num_rows - 1 if request.is_decode else -1 for request in problem.requests]
    assert keywords["num_decode_draft_tokens_cpu"].tolist() == drafts
    assert keywords["num_accepted_tokens"].tolist() == list(range(1, len(drafts) + 1))


def test_states_lie_transposed_in_the_same_memory_and_come_back_bit_by_bit():
    memory = torch.randn(3 * 40)
    states = memory.as_strided((3, 2, 3, 4), (40, 12, 4, 1), 8)
    states[1, 0, 2, 3] = torch.nan
    before, right = memory.clone(), states.transpose(-1, -2).reshape(3, -1)
    with _transposed(states):
        inside = states.reshape(3, -1)
        torch.testing.assert_close(inside, right, equal_nan=True, rtol=0, atol=0)
        states[2] = states[2] * 2
    after = before.clone()
    after.as_strided((2, 3, 4), (12, 4, 1), 88).mul_(2)
    assert torch.equal(memory.view(torch.int32), after.view(torch.int32))


def test_the_plain_weight_of_the_convolution_is_kept_beside_the_packed_one(platform):
    weight, module = _convolution(8, torch.bfloat16)
    assert weight[:, 0].tolist() == [[0, 0, 0, 1]] * 8
    assert module.weight[:, 0].tolist() == [[1, 1, 1, 2]] * 8


@pytest.mark.parametrize(
    ("case_id", "changes", "reason"),
    [
        ("gdn-decode", {}, "head_size 32 and head_size_v 16: vLLM's kernels require 64 or 128 for both"),
        ("gdn-scale", {"head_size": 64, "head_size_v": 64}, "scale 0.5: vLLM's layer has the default"),
        ("gdn-normalised", {"head_size": 64, "head_size_v": 64}, "qk_l2norm false"),
        ("gdn-exact", {"head_size": 64, "head_size_v": 64}, "dtype float32: vLLM's layer requires bfloat16 on a CPU"),
        ("kda-mixed.bfloat16-float32", {}, "rule kda: supported are gdn"),
    ],
)
def test_what_the_layer_of_vllm_cannot_be_is_refused(platform, case_id, changes, reason):
    theirs = type("Theirs", (), {"get_name": staticmethod(lambda: "GDN_ATTN")})
    case = CASES[case_id]
    layer = type(case.layer)(**{each.name: getattr(case.layer, each.name) for each in fields(case.layer)} | changes)
    backend = state_space_backend(theirs)
    assert issubclass(backend, StateSpaceBackend)
    assert issubclass(backend.get_impl_cls(), GatedDeltaNet)
    assert any(reason in each for each in backend.unsupported_reasons(layer, case.cache, case.batch))


def test_a_class_whose_layer_is_not_known_runs_builders_alone(platform):
    theirs = type("Theirs", (), {"get_name": staticmethod(lambda: "OTHER")})
    case = CASES["mamba1-drafts"]
    backend = state_space_backend(theirs)
    reasons = backend.unsupported_reasons(case.layer, case.cache, case.batch)
    assert reasons == ["attncheck runs no kernels of this class, only its builder"]
    paged = load_suite("decode").cases[0]
    assert undeclared(backend, paged.layer, paged.cache, paged.batch) == []
    assert backend.unsupported_reasons(paged.layer, paged.cache, paged.batch) == []
