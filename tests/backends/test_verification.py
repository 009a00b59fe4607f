"""Each broken promise of form is named, with the call that would fail."""

import pytest
import torch

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder, SDPAImpl
from attncheck.backends.contract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from attncheck.backends.verification import contract_problems


def with_impl(impl, **declarations):
    return type("Mine", (SDPABackend,), {"get_impl_cls": staticmethod(lambda: impl), **declarations})


def with_builder(builder):
    return type("Mine", (SDPABackend,), {"get_builder_cls": staticmethod(lambda: builder)})


def with_functions(offer):
    return type("Mine", (SDPABackend,), {"functions": staticmethod(offer)})


class ShortForward(SDPAImpl):
    def forward(self, layer, query, key, value, kv_cache):
        pass


class NoOutput(SDPAImpl):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata):
        pass


class NineArguments(SDPAImpl):
    def __init__(self, a, b, c, d, e, f, g, h, i):
        pass


class WithoutSinks(SDPAImpl):
    def __init__(self, a, b, c, d, e, f, g, h, i, j):
        pass


class Unfinished(AttentionImpl):
    def __init__(self, *args):
        pass


class ListBuild(SDPABuilder):
    def build(self, seq_lens, query_lens):
        pass


class UnfinishedBuilder(AttentionMetadataBuilder):
    def __init__(self, *args):
        pass


@pytest.mark.parametrize(
    ("backend", "problem"),
    [
        (
            with_impl(ShortForward),
            (
                "ShortForward.forward(self, layer, query, key, value, kv_cache) cannot be called with "
                "(layer, query, key, value, kv_cache, attn_metadata, output="
            ),
        ),
        (
            with_impl(NoOutput, features=frozenset()),
            "attn_metadata, output=): got an unexpected keyword argument 'output'",
        ),
        (with_impl(NineArguments), "NineArguments.__init__(self, a, b, c, d, e, f, g, h, i) cannot be called with"),
        (
            with_impl(WithoutSinks, features=frozenset({"sinks"})),
            "sinks=): got an unexpected keyword argument 'sinks'",
        ),
        (
            with_impl(NoOutput, features=frozenset({"lse"})),
            "attn_metadata, output=, output_lse=)",
        ),
        (
            with_impl(NoOutput, features=frozenset({"output_quant"})),
            "attn_metadata, output=, output_scale=, output_block_scale=)",
        ),
        (with_impl(Unfinished), "impl Unfinished does not implement forward"),
        (with_impl(dict), "get_impl_cls() returned <class 'dict'>, which is no subclass of AttentionImpl"),
        (
            with_impl(SDPAImpl, forward_includes_kv_cache_update=False),
            "forward_includes_kv_cache_update is False, but SDPAImpl has no do_kv_cache_update",
        ),
        (with_builder(ListBuild), "ListBuild.build(self, seq_lens, query_lens) cannot be called with"),
        (with_builder(UnfinishedBuilder), "builder UnfinishedBuilder does not implement build"),
        (
            with_builder(type("Certain", (SDPABuilder,), {"cudagraph_support": "ALWAYS"})),
            "Certain.cudagraph_support is 'ALWAYS', no AttentionCGSupport",
        ),
        (
            with_builder(type("Own", (SDPABuilder,), {"get_cudagraph_support": lambda self, config, spec: None})),
            "Own.get_cudagraph_support(self, config, spec) cannot be called with (vllm_config, kv_cache_spec)",
        ),
        (
            with_builder(type("Unset", (SDPABuilder,), {"get_cudagraph_support": None})),
            "Unset.get_cudagraph_support is None, which cannot be called",
        ),
        (with_impl(SDPAImpl, features=("sinks",)), "features is a tuple, not a frozenset of names"),
        (with_impl(SDPAImpl, features=frozenset({"sink"})), "features: unknown name 'sink'; did you mean 'sinks'?"),
        (with_impl(SDPAImpl, supported_layouts="NHD"), "supported_layouts is a str, not a list of names"),
        (with_impl(SDPAImpl, supported_layouts=("NDH",)), "supported_layouts: unknown name 'NDH'; did you mean 'NHD'?"),
        (with_impl(SDPAImpl, supported_attn_types=("causal",)), "supported_attn_types: unknown name 'causal'"),
        (with_impl(SDPAImpl, supported_kv_cache_dtypes=("int8",)), "supported_kv_cache_dtypes: unknown name 'int8'"),
        (
            with_impl(SDPAImpl, supports_head_size=classmethod(lambda cls, size: size == 64)),
            "that attncheck's classes do not read: declare get_supported_head_sizes",
        ),
        (with_impl(SDPAImpl, conventions={"lse_base": "2"}), "conventions is a dict, not a Conventions"),
        (with_impl(SDPAImpl, get_name=staticmethod(lambda: None)), "get_name() returned None, which is no string"),
        (with_impl(SDPAImpl, version=classmethod(lambda cls: 1 / 0)), "version() raised ZeroDivisionError"),
        (
            with_impl(SDPAImpl, get_kv_cache_shape=staticmethod(lambda num_blocks: (num_blocks,))),
            "cannot be called with (num_blocks, block_size, num_kv_heads, head_size, head_size_v=)",
        ),
        (
            with_impl(SDPAImpl, unsupported_reasons=classmethod(lambda cls, layer: [])),
            "unsupported_reasons(layer) cannot be called with (layer, cache, batch)",
        ),
        (
            with_functions(lambda: {"merge": max}),
            "functions(): unknown function 'merge' (known: merge_attn_states, causal_conv1d",
        ),
        (with_functions(lambda: {"swap_blocks": 3}), "functions() has 3 as swap_blocks, which cannot be called"),
        (
            with_functions(lambda: {"copy_blocks": lambda cache, source, destination: None}),
            "copy_blocks(cache, source, destination) cannot be called with (caches, mapping): missing",
        ),
        (
            with_functions(lambda: {"causal_conv1d": lambda x, w, b, states, starts, lines, initial: x}),
            "causal_conv1d(x, w, b, states, starts, lines, initial) cannot be called with",
        ),
        (with_functions(lambda: [max]), "functions() returned a list, not a dict of functions by name"),
        (with_functions(lambda: 1 / 0), "functions() raised ZeroDivisionError: division by zero"),
        (
            with_impl(SDPAImpl, get_builder_cls=staticmethod(lambda: {}["key"])),
            "get_builder_cls() raised KeyError: 'key'",
        ),
    ],
)
def test_one_broken_promise_is_one_problem(backend, problem):
    problems = contract_problems(backend)
    assert any(problem in found for found in problems), problems


def test_all_problems_are_listed_at_once():
    class Empty(AttentionBackend):
        features = frozenset({"magic"})

    problems = contract_problems(Empty)
    assert problems[0] == "backend Empty does not implement get_builder_cls, get_impl_cls, get_name"
    assert len(problems) == 2
    assert "'magic'" in problems[1]


@pytest.mark.parametrize("where", ["get_impl_cls", "get_builder_cls", "functions"])
def test_a_missing_library_is_not_a_broken_promise(where):
    def factory():
        raise ModuleNotFoundError("no kernels here")

    backend = type("Mine", (SDPABackend,), {where: staticmethod(factory)})
    with pytest.raises(ModuleNotFoundError):
        contract_problems(backend)


def test_a_builtin_function_has_no_signature_to_examine():
    assert contract_problems(with_functions(lambda: {"swap_blocks": dict.update})) == []
    assert contract_problems(with_functions(lambda: {"merge_attn_states": torch.add})) == []
