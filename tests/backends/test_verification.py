"""Each broken promise of form is named, with the call that would fail."""

import pytest
import torch

from attncheck.backends.candidates.torch_sdpa import SDPABackend, SDPABuilder, SDPAImpl
from attncheck.backends.contract import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from attncheck.backends.verification import contract_problems


def mine(**members):
    """A right backend but for these members; functions need no ``self``."""
    wrapped = {name: staticmethod(each) if callable(each) else each for name, each in members.items()}
    return type("Mine", (SDPABackend,), wrapped)


def with_impl(forward=None, init=None, base=SDPAImpl, **members):
    methods = {"forward": forward, "__init__": init}
    impl = type("Own", (base,), {name: each for name, each in methods.items() if each})
    return mine(get_impl_cls=lambda: impl, **members)


def with_builder(base=SDPABuilder, **members):
    builder = type("Own", (base,), members)
    return mine(get_builder_cls=lambda: builder)


def no_output(self, layer, query, key, value, kv_cache, attn_metadata):
    pass


BROKEN = [
    (
        with_impl(lambda self, layer, query, key, value, kv_cache: None),
        "kv_cache) cannot be called with (layer, query, key, value, kv_cache, attn_metadata, output=",
    ),
    (
        with_impl(no_output, features=frozenset()),
        "attn_metadata, output=): got an unexpected keyword argument 'output'",
    ),
    (
        with_impl(init=lambda self, a, b, c, d, e, f, g, h, i: None),
        "(self, a, b, c, d, e, f, g, h, i) cannot be called with",
    ),
    (
        with_impl(init=lambda self, a, b, c, d, e, f, g, h, i, j: None, features=frozenset({"sinks"})),
        "sinks=): got an unexpected keyword argument 'sinks'",
    ),
    (with_impl(no_output, features=frozenset({"lse"})), "attn_metadata, output=, output_lse=)"),
    (
        with_impl(no_output, features=frozenset({"output_quant"})),
        "attn_metadata, output=, output_scale=, output_block_scale=)",
    ),
    (with_impl(base=AttentionImpl, init=lambda self, *args: None), "impl Own does not implement forward"),
    (
        mine(get_impl_cls=lambda: dict),
        "get_impl_cls() returned <class 'dict'>, which is no subclass of AttentionImpl",
    ),
    (
        mine(forward_includes_kv_cache_update=False),
        "forward_includes_kv_cache_update is False, but SDPAImpl has no do_kv_cache_update",
    ),
    (
        with_builder(build=lambda self, seq_lens, query_lens: None),
        "(self, seq_lens, query_lens) cannot be called with",
    ),
    (with_builder(AttentionMetadataBuilder), "builder Own does not implement __init__, build"),
    (with_builder(cudagraph_support="ALWAYS"), "Own.cudagraph_support is 'ALWAYS', no AttentionCGSupport"),
    (
        with_builder(get_cudagraph_support=lambda self, config, spec: None),
        "(self, config, spec) cannot be called with (vllm_config, kv_cache_spec)",
    ),
    (with_builder(get_cudagraph_support=None), "Own.get_cudagraph_support is None, which cannot be called"),
    (mine(features=("sinks",)), "features is a tuple, not a frozenset of names"),
    (mine(features=frozenset({"sink"})), "features: unknown name 'sink'; did you mean 'sinks'?"),
    (mine(supported_layouts="NHD"), "supported_layouts is a str, not a list of names"),
    (mine(supported_layouts=("NDH",)), "supported_layouts: unknown name 'NDH'; did you mean 'NHD'?"),
    (mine(supported_attn_types=("causal",)), "supported_attn_types: unknown name 'causal'"),
    (mine(supported_kv_cache_dtypes=("int8",)), "supported_kv_cache_dtypes: unknown name 'int8'"),
    (mine(registered_kv_cache_dtype="int8"), "registered_kv_cache_dtype is 'int8', not a name and a torch.dtype"),
    (
        mine(supports_head_size=lambda size: size == 64),
        "that attncheck's classes do not read: declare get_supported_head_sizes",
    ),
    (mine(conventions={"lse_base": "2"}), "conventions is a dict, not a Conventions"),
    (mine(get_name=lambda: None), "get_name() returned None, which is no string"),
    (mine(version=lambda: 1 / 0), "version() raised ZeroDivisionError"),
    (
        mine(get_kv_cache_shape=lambda num_blocks: (num_blocks,)),
        "cannot be called with (num_blocks, block_size, num_kv_heads, head_size, head_size_v=)",
    ),
    (
        mine(unsupported_reasons=lambda layer: []),
        "unsupported_reasons(layer) cannot be called with (layer, cache, batch)",
    ),
    (
        mine(functions=lambda: {"merge": max}),
        "functions(): unknown function 'merge' (known: merge_attn_states, causal_conv1d",
    ),
    (mine(functions=lambda: {"swap_blocks": 3}), "functions() has 3 as swap_blocks, which cannot be called"),
    (
        mine(functions=lambda: {"copy_blocks": lambda cache, source, destination: None}),
        "copy_blocks(cache, source, destination) cannot be called with (caches, mapping): missing",
    ),
    (
        mine(functions=lambda: {"causal_conv1d": lambda x, w, b, states, starts, lines, initial: x}),
        "causal_conv1d(x, w, b, states, starts, lines, initial) cannot be called with",
    ),
    (mine(functions=lambda: [max]), "functions() returned a list, not a dict of functions by name"),
    (mine(functions=lambda: 1 / 0), "functions() raised ZeroDivisionError: division by zero"),
    (mine(get_builder_cls=lambda: {}["key"]), "get_builder_cls() raised KeyError: 'key'"),
]


def test_a_broken_promise_is_named():
    for backend, problem in BROKEN:
        problems = contract_problems(backend)
        assert any(problem in found for found in problems), (problem, problems)


def test_all_problems_are_listed_at_once():
    problems = contract_problems(type("Empty", (AttentionBackend,), {"features": frozenset({"magic"})}))
    assert problems[0] == "backend Empty does not implement get_builder_cls, get_impl_cls, get_name"
    assert len(problems) == 2
    assert "'magic'" in problems[1]


@pytest.mark.parametrize("where", ["get_impl_cls", "get_builder_cls", "functions"])
def test_a_missing_library_is_not_a_broken_promise(where):
    def factory():
        raise ModuleNotFoundError("no kernels here")

    with pytest.raises(ModuleNotFoundError):
        contract_problems(mine(**{where: factory}))


def test_a_builtin_function_has_no_signature_to_examine():
    assert contract_problems(mine(functions=lambda: {"swap_blocks": dict.update})) == []
    assert contract_problems(mine(functions=lambda: {"merge_attn_states": torch.add})) == []
