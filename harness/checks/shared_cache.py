"""A layer that reads another layer's cache must not write keys and values passed to it.

A model computes keys in every layer by default, and passes them to ``forward``. The output must depend on the cache
alone, and the cache must not change. A backend may also refuse such keys.
"""

from dataclasses import replace

import torch
from torch import Tensor

from attncheck.harness.checks.findings import Broken, Finding, Holds
from attncheck.harness.checks.numerics import check_numerics
from attncheck.harness.driver.construction import construct_builder
from attncheck.harness.driver.foreign_code import StageError, call_backend
from attncheck.harness.driver.forward_calls import ForwardCall, forward_calls_of
from attncheck.harness.driver.kv_pool import same_bytes
from attncheck.harness.driver.persistent_inputs import copied_calls
from attncheck.harness.driver.results import observed, placed
from attncheck.harness.driver.session import Session
from attncheck.harness.driver.step import make_step
from attncheck.harness.truth.truth import Truth


def check_handed_keys(session: Session, truth: Truth, finding: Holds) -> Finding:
    """Run one more step that passes keys; return ``finding`` if they are neither written nor used, or what is wrong.

    Return ``finding`` without a step if the cache update is separate from ``forward``, because such a layer does not
    call the update; for a latent layer; or if the step takes several forward calls.
    """
    problem, backend, pool = session.problem, session.backend, session.pool
    step = make_step(problem, session.device, session.order, pad_seq_len=backend.conventions.pad_seq_len)
    calls = forward_calls_of(step, backend.features, session.threshold)
    if pool is None or len(calls) > 1 or problem.layer.mla is not None or not backend.forward_includes_kv_cache_update:
        return finding
    call = _with_keys(copied_calls(calls)[0], problem.keys, problem.values)
    try:
        builder = call_backend(
            "builder", lambda: construct_builder(backend, (problem,), session.device, session.attn_layer)
        )
        metadata = call_backend("build", lambda: builder.build(call.common_prefix_len, call.common))
        kv_cache = pool.filled()
        before = pool.bytes().clone()
        buffers = session.layer.output_buffers(problem, call)
        returned = call_backend(
            "forward", lambda: session.layer.enter(call, kv_cache, metadata, buffers), session.device
        )
    except StageError as failure:
        raised = failure.raised
        return finding if raised.is_refusal else replace(raised, stage=f"{raised.stage} with keys for a shared cache")
    if not same_bytes(before, pool.bytes()):
        return Broken(
            "a layer that shares another's cache wrote the keys it was passed",
            finding.figures,
            "the layer ignores kv_sharing_target_layer_name: such a layer reads the cache of that layer, "
            "and writes nothing",
        )
    result = session.layer.result_of(call, returned, buffers)
    seen = observed(placed([result]), step, [result], pool_before=None, pool_after=None, changed=())
    judged = check_numerics(problem, truth, seen, explains=False)
    if not isinstance(judged, Broken):
        return finding
    return Broken(f"a layer that shares another's cache uses the keys it was passed: {judged.summary}", judged.figures)


def _with_keys(call: ForwardCall, keys: Tensor, values: Tensor) -> ForwardCall:
    """Return the call with a key and a value for each query row, whose values occur nowhere in the cache."""
    key, value = (torch.full((len(call.query), *rows.shape[1:]), 3.0).to(call.query) for rows in (keys, values))
    return replace(call, key=key, value=value)
